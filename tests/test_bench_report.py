"""jaxcomm.bench: contents of texts."""

import pathlib

import pytest
from test_bench import record

from jaxcomm.bench import records, report
from tools import benchmark_table


def test_a_line_has_the_columns_of_its_header():
    run = {
        "command": "python -m jaxcomm.bench", "started": "today", "commit": None, "dirty": None,
        "machine": {"cpu": "CPU", "cores": 2, "memory_gib": 4},
        "versions": {"python": "3", "jax": "1", "jaxlib": "2", "jaxcomm": "0"},
        "parameters": {"chain": 16, "isolate": False, "axes": "8"},
    }  # fmt: skip
    *_, titles, units = report.header(run, 8, 1).splitlines()
    line = report.line(record(busbw_gb_per_s=1234.5))
    ends = {"size": "1024", "count": "256", "time": "20.00", "busbw": "1234.50", "p99": "30.00", "reps": "30"}
    for title, value in ends.items():
        end = titles.index(f" {title} " if title != "reps" else " reps") + len(title) + 1
        assert line[:end].endswith(f" {value}"), title
    starts = {"type": "float32", "op": "psum", "mode": "chain", "algorithm": "direct", "beside": "lax.psum"}
    for title, value in starts.items():
        assert line[titles.index(f" {title} ") :].startswith(f" {value} "), title
    assert units.split() == ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)", "(us)", "(us)", "(us)"]
    assert len(line) <= len(titles)


def test_a_line_names_wrong_elements_of_the_other_side():
    right, wrong = record(wrong=3), record(baseline_wrong=2)
    assert "#" not in report.line(right) and report.line(wrong).endswith("  # lax.psum: 2 wrong")


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.04, "0.0 us"), (99.94, "99.9 us"), (100, "100 us"), (999.4, "999 us"), (1000, "1.0 ms"), (123456, "123.5 ms")],
)
def test_times_have_three_digits_or_so(us, text):
    assert benchmark_table._time_text(us) == text


def test_the_name_of_a_processor_that_linux_does_not_name(monkeypatch):
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: "flags: none\n")
    monkeypatch.setattr(records.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(records.platform, "processor", lambda: "")
    assert records._cpu_model() == "aarch64"
    monkeypatch.setattr(records.platform, "processor", lambda: "Neoverse")
    assert records._cpu_model() == "Neoverse"
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: "model name\t: EPYC: 9\n")
    assert records._cpu_model() == "EPYC: 9"


def test_tables_of_one_mode_only():
    run = {
        "commit": "0123456789abcdef", "dirty": True,
        "machine": {"cpu": "CPU", "cores": 2, "memory_gib": 4},
        "versions": {"python": "3", "jax": "1", "jaxlib": "2", "jaxcomm": "0"},
        "parameters": {"chain": 16, "dtype": "float32", "ranks": 8},
    }  # fmt: skip
    rows = [record(mode="call"), record(mode="call", op="pmax", size_bytes=1 << 20, time_us=2000.0)]
    assert benchmark_table.markdown(run, rows).splitlines() == [
        "One op per `jit` call, host to host (in brackets: time of `jax.lax` divided by it):",
        "",
        "| op | 1 KiB | 1 MiB |",
        "|---|---|---|",
        "| `psum` | 20.0 us (5.0x) |  |",
        "| `pmax` |  | 2.0 ms (0.1x) |",
        "| copy limit | 10.0 us | 10.0 us |",
        "",
        "8 CPU devices, float32. CPU, 2 cores, 4 GiB; Python 3, jax 1, jaxlib 2, jaxcomm 0, commit 0123456789ab with "
        "changes.",
    ]
