"""jaxcomm.bench: contents of texts."""

from jaxcomm.bench import records, report

RECORD = {
    "op": "psum", "mode": "chain", "size_bytes": 1024, "count": 256, "dtype": "float32", "ranks": 8,
    "algorithm": "direct", "chain": 16, "reps": 30, "time_us": 20.0, "p99_us": 30.0, "algbw_gb_per_s": 0.05,
    "busbw_gb_per_s": 1234.5, "baseline": "lax.psum", "baseline_time_us": 100.0, "baseline_p99_us": 150.0,
    "limit_us": 10.0,
}  # fmt: skip


def test_a_line_has_the_columns_of_its_header():
    run = {
        "command": "python -m jaxcomm.bench", "started": "today", "commit": None, "dirty": None,
        "machine": {"cpu": "CPU", "cores": 2, "memory_gib": 4},
        "versions": {"python": "3", "jax": "1", "jaxlib": "2", "jaxcomm": "0"},
        "parameters": {"chain": 16, "isolate": False, "axes": "8"},
    }  # fmt: skip
    *above, titles, units = report.header(run, 8, 1).splitlines()
    assert (above[2][-11:], above[4][2:33]) == ("time per op", "limit: 2 threads copy 8 buffers")
    line = report.line(records.Record(**RECORD))
    ends = {"size": "1024", "count": "256", "time": "20.00", "busbw": "1234.50", "p99": "30.00", "reps": "30"}
    ends |= {"other": "100.00", "other p99": "150.00", "other/ours": "5.00", "ours/limit": "2.00", "#wrong": "0"}
    ends["algbw"] = "0.05"
    for title, value in ends.items():
        end = titles.index(f" {title} " if title != "reps" else " reps") + len(title) + 1
        assert line[:end].endswith(f" {value}"), title
    starts = {"type": "float32", "op": "psum", "mode": "chain", "algorithm": "direct", "beside": "lax.psum"}
    for title, value in starts.items():
        assert line[titles.index(f" {title} ") :].startswith(f" {value} "), title
    run |= {"commit": "0123456789abcdef", "dirty": True, "parameters": run["parameters"] | {"isolate": True}}
    above = report.header(run, 8, 2).splitlines()
    assert above[1].endswith(" commit 0123456789ab with changes")
    assert above[2].startswith("# 2 processes x 4 devices; call: ") and above[2].endswith(" per op, isolated")
    assert units.split() == ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)", "(us)", "(us)", "(us)"]
    assert len(line) <= len(titles)
    assert report.line(records.Record(**RECORD, baseline_wrong=2)).endswith("  # lax.psum: 2 wrong")
