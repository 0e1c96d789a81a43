"""The report of a trace beside the copy limit and the prediction, and files of a folder, all written by hand."""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import _config
from jaxcomm._processes import bootstrap
from jaxcomm.recorder import _cli, _file, _pytorch, _roofline, _runs, _start, _top


def event(number, moving_us, waiting_us, **changed):
    shape = {"op": "psum", "dtype": "float32", "item_bytes": 4, "input_count": 1 << 18, "output_count": 1 << 18}
    call = {"site": "a.py:1 (f)", "algorithm": "ring", "result": "done", "predicted_us": 4e6, "number": number}
    times = {"moving_us": moving_us, "waiting_us": waiting_us}
    return {"pid": 0, "args": {**shape, **call, **times, "ranks_of_nodes": [4], "processes": 1, **changed}}


def test_report(tmp_path):
    """Calls of two processes, each in the rows of two ranks; one of an op without prediction; one that has failed."""
    slow = [event(1, 9e6, 1e6)] * 2 + [event(2, 10e6, 2e6)] * 2 + [event(3, 14e6, 6e6)] * 2
    tokens = event(4, 1e6, 3e6, op="moe.dispatch", input_count=8, output_count=64, predicted_us=None)
    slow += [event(5, 99e6, 1e6, result="failed"), event(6, 1e3, 5e4, site="b.py:2 (g)", predicted_us=1)]
    path = tmp_path / "run.json"
    slow += [{**one, "pid": 1} for one in slow]
    path.write_text(json.dumps({"traceEvents": [*slow, tokens], "otherData": {"calls that the ring has dropped": 5}}))
    rows, notes = _roofline.report([path], limit_of=lambda shape: shape.size_bytes / 1e3)
    assert [(row.op, row.calls, row.size_bytes, row.copy_limit_us) for row in rows] == [
        ("psum", 3, 1 << 20, (1 << 20) / 1e3),
        ("moe.dispatch", 1, 32, 0.032),
        ("psum", 1, 1 << 20, (1 << 20) / 1e3),
    ]
    assert rows[2].advice == ()  # it takes less than 1 % of the time
    assert (rows[0].moving_us, rows[0].waiting_us) == (10e6, 2e6)
    assert (rows[0].total_s, rows[0].waiting_s) == (42, 9)
    best = jaxcomm.explain("psum", jax.ShapeDtypeStruct((1 << 18,), jnp.float32), 4)
    advice = "\n".join(rows[0].advice)
    assert f"algorithm={best.algorithm!r} is predicted to take {1e6 * best.predicted_time_s:.0f} us" in advice
    assert "2.5 times the prediction" in advice and "steps take longer than bytes" in advice
    assert "psum_start beside computations hides up to 30000.0 ms" in advice and "wait" not in advice
    waits, far = rows[1].advice
    assert waits.startswith("ranks wait for each other 3 times as long") and far == "31250000 times the copy limit"
    assert "without the first 5 calls" in notes[0]
    lines = _roofline.text(rows, notes).splitlines()
    assert lines[0] == "5 calls, 46.051 s; ranks waited for each other in 12.050 s"
    assert [
        " ".join(line.split()) for line in lines if line.endswith(("site", "(f)", "(g)")) or line[:4] == "note"
    ] == [
        "op ranks bytes calls wait us move us predicted copy limit total s algorithm, site",
        "psum 4 1048576 3 2000000.0 10000000.0 4000000.0 1048.6 42.000 ring, a.py:1 (f)",
        "moe.dispatch 4 32 1 3000000.0 1000000.0 - 0.0 4.000 ring, a.py:1 (f)",
        "psum 4 1048576 1 50000.0 1000.0 1.0 1048.6 0.051 ring, b.py:2 (g)",
        f"note: {notes[0]}",
    ]


def test_another_file_is_no_trace(tmp_path, capsys):
    (tmp_path / "other.json").write_text("[]")
    assert _cli.main(["report", str(tmp_path / "other.json")]) == 2
    assert "not a trace of jaxcomm" in capsys.readouterr().err


@pytest.mark.parametrize("scope", ["process", "node", "network"])
@pytest.mark.parametrize("op", ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"])
def test_predictions(op, scope):
    """As explain() has them. Between the ranks pass as many bytes as nccl-tests count."""
    operand, result = (1 << 10 if op == "all_gather" else 1 << 12), (1 << 10 if op == "psum_scatter" else 1 << 12)
    nodes = (2, 2) if scope == "network" else (4,)
    shape = _roofline.Shape(op, "float32", 4, operand, result, nodes, 1 if scope == "process" else 4)
    more = {"perm": [(rank, (rank + 1) % 4) for rank in range(4)]} if op == "ppermute" else {}
    more |= {"scope": scope} | ({"ranks_per_node": 2} if scope == "network" else {})
    expected = jaxcomm.explain(op, jax.ShapeDtypeStruct((operand,), jnp.float32), 4, **more)
    assert shape.predicted() == (expected.algorithm, expected.predicted_time_s)
    assert _roofline.copy_limit_us(dataclasses.replace(shape, input_count=0, output_count=0)) is None
    assert len(nodes) == 1 or _roofline.copy_limit_us(shape) is None
    for algorithm in {"ring", "direct"} & set(jaxcomm.algorithms(op)) if op != "ppermute" and len(nodes) == 1 else ():
        assert sum(shape.traffic(algorithm).values()) == 4 * shape.bus_bytes(), algorithm


NUMBERS = "number key run_id iteration sequence input_count output_count arrived_ns started_ns running_ns ended_ns"
NAMES = f"{NUMBERS} site dtype phase arrived_mask waiting_rank waiting_peer".split()


def test_rows_of_calls():
    """In the order of their numbers. Ranks of a wait count from 1. An export has the calls of a rank's groups."""
    table = np.zeros(3, [(name, "i8") for name in NAMES])
    table["number"], table["site"], table["dtype"] = (3, 2, 1), (0, 0, 1), (1, 0, 0)
    table["waiting_rank"], table["waiting_peer"], table["arrived_mask"] = (1, 0, 0), (4, 0, 0), (1, 2, 3)
    groups = _file.Group(1, (3, 1, 0), (0, 0, 1)), _file.Group(2, (1,), (0,))
    sites = [_file.Site("psum at a.py:1 (f)", "", 0, group, 1, 0, 0, 0, 0) for group in groups]
    layout = {"dtypes": {"int8": 1, "float32": 4}, "phases": ["done"], "calls": {"fields": [[name] for name in NAMES]}}
    calls = _file._calls(types.SimpleNamespace(rows=lambda name: table), {"process": 0}, sites, layout)
    assert [(c.number, c.waiting_rank, c.waiting_peer, c.arrived, c.dtype, c.item_bytes) for c in calls] == [
        (1, None, None, (1,), "int8", 1), (2, None, None, (1,), "int8", 1), (3, 0, 3, (3,), "float32", 4),
    ]  # fmt: skip
    ring = _file.Ring(pathlib.Path(), {"process": 0}, sites, calls, {}, [], [])
    entries = {rank: [call["record_id"] for call in _pytorch._dump(ring, rank, 0)["entries"]] for rank in (3, 1)}
    assert entries == {3: [2, 3], 1: [1, 2, 3]}


def test_a_process_is_known_by_its_start():
    """Another one may have its number later."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    header = {"ending": "", "kernel": bootstrap.kernel_id(), "pid": os.getpid()}
    for later, state in ((0, "running"), (1, "dead")):
        ring = _file.Ring(pathlib.Path(), header | {"process_start_ticks": ticks - later}, [], [], {}, [], [])
        assert ring.state == state


def test_the_latest_program_of_a_folder(tmp_path, monkeypatch):
    """Two processes were started again, and another program between them. The dumps are of different errors."""
    headers, programs = {}, (("a", 0, 1, 2), ("a", 1, 2, 3), ("b", 2, 3, 9), ("a", 1, 4, 20), ("a", 0, 5, 8))
    for job, process, started_s, alive_s in programs:
        path = f"process-{process}-{started_s}-1.ring"
        for name in (path, f"{path}.dump"):
            (tmp_path / name).touch()
        headers[path] = {"job": job, "process": process, "num_processes": 2, "kernel": "k:1"}
        for clock in ("ns", "unix_ns"):
            headers[path] |= {f"started_{clock}": started_s * 10**9, f"alive_{clock}": alive_s * 10**9}
    of = lambda path: headers[path.name.removesuffix(".dump")]  # noqa: E731
    monkeypatch.setattr(_file, "read", lambda path, _=True: _file.Ring(path, of(path), [], [], {}, [], []))
    run = _runs.find(tmp_path, dumps=True, notes=["first"])
    assert {p: ring.header["alive_ns"] // 10**9 for p, ring in run.rings.items()} == {0: 8, 1: 20}
    assert run.rings[0].path.suffix == ".dump" and set(_runs.around(run.rings[1], False).rings) == {0, 1}
    assert run.notes == [
        "first",
        f"{tmp_path} has 3 runs; this is the latest, of 2 files",
        "the dumps are of different errors: 12 s lie between them",
    ]


def test_old_files_of_the_default_folder(tmp_path, monkeypatch):
    """Too many or too old ones; those of processes that run stay."""
    gone, now = 1 << 22, int(time.time())  # above the largest process number

    def left(*files, kept=256):
        monkeypatch.setattr(_start, "_KEPT_FILES", kept)
        for age_s, pid in files:
            (tmp_path / f"process-0-{now - age_s}000-{pid}.ring").touch()
        _start._remove_old(tmp_path)
        return sorted((now - int(p.name.split("-")[2][:-3]), int(p.stem.split("-")[3])) for p in tmp_path.iterdir())

    young, old, runs = [(1, gone), (2, gone)], [(90_000, gone)], [(3, os.getpid()), (95_000, os.getpid())]
    assert left(*young, *old, *runs) == [*young, *runs]
    assert left(kept=1) == [young[0], *runs]


def test_the_end_of_a_process_keeps_its_errors(tmp_path, monkeypatch):
    endings, path = [], tmp_path / "process-0-1-1.ring"
    monkeypatch.setattr(
        _start, "_core", types.SimpleNamespace(recorder=types.SimpleNamespace(set_ending=endings.append))
    )
    for remove, error, dump in itertools.product((True, False), (None, KeyError()), (False, True)):
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        files = [path, path.with_name(f"{path.name}.{'dump' if dump else 'prom'}")]
        for file in files:
            file.touch()
        _start._end(path, remove)
        assert sorted(tmp_path.iterdir()) == ([] if remove and not error and not dump else files)
        assert endings.pop() == ("KeyError" if error else "exit")
        for file in files:
            file.unlink(missing_ok=True)


def test_rates_of_top_are_of_the_latest_interval(monkeypatch):
    clock, runs = itertools.count(0, 10), itertools.count()
    monkeypatch.setattr(_top, "snapshot", lambda *given: given)
    monkeypatch.setattr(_runs, "find", lambda folder, notes: next(runs))
    monkeypatch.setattr(_top, "time", types.SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: next(clock)))
    found = list(itertools.islice(_top.watch(pathlib.Path(), list, 10, 60), 2))
    assert found == [(1, 0, 10, 60), (2, 1, 10, 60)]


def test_a_folder_of_another_user_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(_start, "config", _config.Config)
    for path, user in ((tmp_path / "link", os.getuid()), (tmp_path, os.getuid() + 1)):
        monkeypatch.setattr(_start, "default_folder", lambda path=path: path)
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        _start.start.__wrapped__()
        assert f"{path} belongs to another user; set JAXCOMM_RECORDER to a folder" in capsys.readouterr().err
