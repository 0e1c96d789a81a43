"""jaxcomm.bench: sizes and bandwidths as in nccl-tests, oracles, alternation, records, reports, command line.

Guards against misleading benchmarks: an oracle that accepts anything, a chain that the compiler shortens, sums that
overflow, bytes that are counted differently from the columns.
"""

import json
import os
import re
import subprocess
import sys
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxcomm
from jaxcomm import bench
from jaxcomm._measure import collectives, size_text, timing
from jaxcomm._measure.collectives import COLLECTIVES
from jaxcomm._measure.process_group import ProcessGroup
from jaxcomm.bench import cli, sweep

SIZED = [name for name, c in COLLECTIVES.items() if c.sized]


def check(*argv, path):
    status = bench.main([*argv, "--check-only", "--json", str(path)])
    return status, json.loads(path.read_text())


# Data.
@pytest.mark.parametrize(
    "arguments",
    [
        *(pytest.param(("--axes", axes), marks=pytest.mark.full) for axes in ("2x4", "6")),
        ("--axes", "3x2", "--isolate"),
    ],
)
def test_both_libraries_agree_with_the_oracles(arguments, tmp_path):
    status, run = check("--begin", "256", "--end", "1K", "--chain", "3", *arguments, path=tmp_path / "r.json")
    assert status == 0
    assert {r["op"] for r in run["records"]} == set(COLLECTIVES)
    for r in run["records"]:
        size = collectives.make_size(COLLECTIVES[r["op"]], r["size_bytes"], 4, r["ranks"])
        assert (r["wrong"], r["baseline_wrong"], r["count"]) == (0, 0, size.count)


@pytest.mark.parametrize(
    "dtype",
    [d if d in ("int8", "bfloat16") else pytest.param(d, marks=pytest.mark.full) for d in collectives.DTYPES],
)
def test_sums_are_exact_in_every_dtype(dtype, tmp_path):
    status, _ = check("--op", "psum", "psum_scatter", "--end", "256", "--dtype", dtype, path=tmp_path / "r.json")
    assert status == 0


@pytest.mark.parametrize("mode", ["call", "chain"])
@pytest.mark.parametrize(
    "name", [op if op in ("psum", "all_to_all") else pytest.param(op, marks=pytest.mark.full) for op in SIZED]
)
def test_wrong_data_is_counted(name, mode, monkeypatch, capsys):
    """Of either library, on all devices. Each has 64 elements, or 8 if scattered; a few of them are zero.

    A chain is checked as well as one op of it, and the numbers are added.
    """
    num_elements = 8 * (8 if name == "psum_scatter" else 64) * (1 + (mode == "chain"))
    for library in (jaxcomm, lax)[: 1 + (COLLECTIVES[name].baseline == "")]:
        real = getattr(library, name)
        with monkeypatch.context() as patch:
            patch.setattr(library, name, lambda *args, real=real, **options: real(*args, **options) * 0)
            assert bench.main(["--op", name, "--end", "256", "--mode", mode, "--check-only"]) == 1
        pattern = r"(\d+) wrong elements" if library is jaxcomm else rf"  # lax.{name}: (\d+) wrong\n"
        assert 0.9 * num_elements < int(re.search(pattern, capsys.readouterr().out)[1]) <= num_elements


def test_a_collective_without_effect_fails_the_check(monkeypatch):
    """A chain of 16 exchanges returns its operand."""
    monkeypatch.setattr(jaxcomm, "all_to_all", lambda x, *args, **kw: x)
    assert bench.main(["--op", "all_to_all", "--end", "256", "--mode", "chain", "--check-only"]) == 1


@pytest.mark.parametrize(
    "n, dtype, chain", [(8, "float32", 16), (6, "float32", 14), (8, "float16", 5), (8, "int8", 16)]
)
def test_chains_of_psum_stay_exact(n, dtype, chain):
    psum = COLLECTIVES["psum"]
    dtype = jax.numpy.dtype(dtype)
    assert collectives.longest_exact_chain(psum, dtype, n, 16) == chain
    values = collectives.num_values(psum, dtype, n, chain)
    assert values >= 2
    if jax.numpy.issubdtype(dtype, np.floating):
        largest = float(values - 1) * n**chain
        assert float(np.array(largest, dtype)) == largest
    with pytest.raises(ValueError, match="psum: sums over 512 ranks are not exact in float8_e4m3fn"):
        collectives.longest_exact_chain(psum, ml_dtypes.float8_e4m3fn, 512, 16)


# Programs.
@pytest.mark.parametrize(("name", "hlo"), [("psum", "all-reduce"), ("ppermute", "collective-permute")])
def test_the_compiler_does_not_shorten_the_chain_of_the_baseline(name, hlo):
    group = cli._make_group((8,))
    collective = COLLECTIVES[name]
    size = collectives.make_size(collective, 1024, 4, 8)
    x = collectives.place(collectives.make_operands(collective, size, np.float32, 8, 1), group)
    program = collectives.program(collective, lax, group, 5, {})
    assert len(re.findall(rf" {hlo}\(", program.lower(x).compile().as_text())) == 5


# Sizes and bandwidths.
@pytest.mark.parametrize(
    "name, operand, count, bus",
    [
        ("all_to_all", 256, 32, 7 / 8),
        ("all_gather", 32, 32, 7 / 8),
        ("psum", 256, 256, 14 / 8),
        ("psum_scatter", 256, 32, 7 / 8),
        ("ppermute", 256, 256, 1),
        ("pbroadcast", 256, 256, 1),
    ],
)
def test_sizes_are_those_of_nccl_tests(name, operand, count, bus):
    collective = COLLECTIVES[name]
    assert collectives.make_size(collective, 1024, 4, 8) == collectives.Size(256, operand, count)
    assert collective.bus_factor(8) == bus
    assert collectives.make_size(collective, 1, 4, 8).total == 8  # never empty
    assert collectives.make_size(collective, 100, 4, 8).total == 24  # whole blocks


def test_sweep_of_sizes():
    assert sweep.sizes(256, 64 << 20, 4) == [256 * 4**i for i in range(10)]
    assert sweep.sizes(1000, 1000, 2) == [1000]
    assert sweep.sizes(256, 256_000, 10) == [256, 2560, 25_600, 256_000]  # log(1000, 10) < 3


def test_texts_of_sizes():
    sizes = {"4096": 4096, "64K": 1 << 16, "64 kib": 1 << 16, "64KB": 64_000, "2M": 2 << 20, "16TiB": 1 << 44, "7b": 7}
    assert {text: size_text.parse(text) for text in sizes} == sizes
    assert size_text.parse_list("3K,1M..5MiB") == (3 << 10, 1 << 20, 2 << 20, 4 << 20)
    shown = {1023: "1023 B", 1 << 10: "1 KiB", 1_500_000: "1.431 MiB", 3 << 30: "3 GiB", 1 << 40: "1 TiB"}
    assert {size: size_text.text(size) for size in shown} == shown
    for text in ("0", "17T", "K", "1 2", "-1", "4M..1M"):
        with pytest.raises(size_text.SizeError, match=r"expected (a number of bytes|the smaller size first: 1M\.\.4M)"):
            size_text.parse_list(text)


# Measuring.
def test_sides_take_turns():
    seen = []
    sides = {name: lambda name=name: seen.append(name) or 1.0 for name in ("ours", "lax", "limit")}
    times = timing.alternate(sides, reps=30, size_bytes=1, max_seconds=None, processes=ProcessGroup())
    assert len(times["ours"].us) == len(times["limit"].us) == 30
    timed = seen[timing._WARM_UPS * 3 :]
    assert timed[:6] == ["ours", "lax", "limit", "lax", "ours", "limit"]


class Pair(ProcessGroup):
    """The first of two processes; the other one is slower in some repetitions."""

    def __init__(self):
        self.size, self.asked = 2, []

    def align(self, go_on=True):
        self.asked.append(go_on)
        return go_on

    def gather(self, thing):
        return [thing, {name: [5.0 if i % 3 else 0.5 for i in range(len(us))] for name, us in thing.items()}]


def test_times_are_those_of_the_slowest_process():
    calls = []
    times = timing.alternate(
        {"ours": lambda: calls.append(0) or 1.0}, reps=30, size_bytes=1, max_seconds=None, processes=Pair()
    )
    assert list(times["ours"].us) == [5.0 if i % 3 else 1.0 for i in range(30)]
    # Untimed calls precede each repetition of a short op except the first, whose duration is unknown.
    assert len(calls) == (timing._WARM_UPS + 30) * (1 + timing._UNCOUNTED) - timing._UNCOUNTED


@pytest.mark.parametrize(
    "size_bytes, max_seconds, reps", [(1 << 20, 0, 30), (2 << 20, 0, 5), (2 << 20, None, 30), (64, None, 30)]
)
def test_fewer_than_30_repetitions_only_where_asked(size_bytes, max_seconds, reps, monkeypatch):
    monkeypatch.setattr(timing, "_ENOUGH_S", 0)
    times = timing.alternate(
        {"ours": lambda: 1.0}, reps=100, size_bytes=size_bytes, max_seconds=max_seconds, processes=ProcessGroup()
    )
    assert len(times["ours"].us) == reps


def test_times_of_a_record_are_medians_and_p99_of_one_op(tmp_path, monkeypatch):
    """The copy limit is no chain."""
    found = {name: timing.Times(us * np.arange(1.0, 102)) for name, us in (("ours", 3), ("lax", 6), ("limit", 1))}
    monkeypatch.setattr(timing, "alternate", lambda sides, **_: {name: found[name] for name in sides})
    real, limits = timing.CopyLimit, []
    monkeypatch.setattr(timing, "CopyLimit", lambda *args, fresh: limits.append((*args, fresh)) or real(*args, fresh))
    out = tmp_path / "r.json"
    arguments = ["--op", "psum", "--end", "256", "--mode", "chain", "--chain", "3", "--json", str(out)]
    assert bench.main(arguments) == 0 and limits == [(8, 256, False)]
    (r,) = json.loads(out.read_text())["records"]
    names = ("time_us", "p99_us", "baseline_time_us", "baseline_p99_us", "limit_us", "reps", "chain")
    assert [r[name] for name in names] == [51, 100, 102, 200, 51, 101, 3]


@pytest.mark.parametrize("fresh", [True, False])
def test_copy_limit_copies(fresh):
    with timing.CopyLimit(3, 1 << 16, fresh=fresh) as limit:
        assert limit.measure_us() > 0
        if not fresh:
            assert (limit._results == 1).all()
        limit._work = lambda thread: 9 - thread
        assert limit.measure_us() == 9  # of the slowest thread


def test_times_of_copies_and_calls(monkeypatch):
    """1 MiB is copied 32 times; a call ends with its result."""
    clock, times = [0], iter((0, 32_000))
    with monkeypatch.context() as patch, timing.CopyLimit(1, 1 << 20, fresh=False) as limit:
        patch.setattr(timing.time, "perf_counter_ns", lambda: next(times))
        assert limit.measure_us() == 1
    result = types.SimpleNamespace(block_until_ready=lambda: clock.append(5000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock[-1])
    assert timing.stopwatch(lambda x: result, None)() == 5


# Records and reports.
def test_a_run_leaves_json_and_a_table(tmp_path, capsys):
    out = tmp_path / "r.json"
    arguments = ["--op", "psum", "pbroadcast", "psum", "barrier", "--begin", "1K", "--end", "4K", "--reps", "30"]
    assert bench.main([*arguments, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    run = json.loads(out.read_text())
    assert run["command"] == f"python -m jaxcomm.bench {' '.join(arguments)} --json {out}"
    assert run["versions"]["jax"] == jax.__version__
    assert run["machine"]["cores"] == timing.cores() and run["environment"]["JAX_PLATFORMS"] == "cpu"
    assert run["parameters"]["ranks"] == 8
    assert [(r["op"], r["mode"], r["size_bytes"]) for r in run["records"]] == [
        *((op, mode, size) for op in ("psum", "pbroadcast") for mode in ("call", "chain") for size in (1024, 4096)),
        *(("barrier", mode, 0) for mode in ("call", "chain")),
    ]
    psum, broadcast, barrier = (run["records"][i] for i in (0, 4, 8))
    assert psum["algbw_gb_per_s"] == pytest.approx(1024 / psum["time_us"] / 1e3)
    assert psum["busbw_gb_per_s"] == pytest.approx(psum["algbw_gb_per_s"] * 14 / 8)
    assert broadcast["baseline"] is None and broadcast["baseline_time_us"] is None
    assert barrier["limit_us"] is None and barrier["algbw_gb_per_s"] is None
    assert "measurements, 0 wrong elements" in text


# Command line.
@pytest.mark.parametrize(
    "argv, message",
    [
        (["--begin", "1X"], "got '1X', expected a number of bytes"),
        (["--axes", "2y4"], "got '2y4', expected sizes of mesh axes"),
        (["--reps", "3"], "got '3', expected an integer from 30"),
        *((["--max-seconds", limit], f"got '{limit}', expected a positive") for limit in ("nan", "0", "inf", "-1")),
        (["--axes", "64"], "64 devices are needed, but JAX has already started with"),
        (["--begin", "1M", "--end", "1K"], "--end: got 1024 bytes, expected at least --begin, 1048576"),
        (["--op", "psum", "--algorithm", "nonsense"], "--algorithm: psum has no 'nonsense'; pass one of "),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_command(tmp_path):
    arguments = ["--op", "psum", "--end", "256", "--axes", "4", "--check-only"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "jaxcomm.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("2 measurements, 0 wrong elements")
