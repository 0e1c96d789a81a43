"""The report of a trace beside the copy limit and the prediction, from events written by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.recorder import _roofline


def event(number, moving_us, waiting_us, **changed):
    shape = {"op": "psum", "dtype": "float32", "item_bytes": 4, "input_count": 1 << 18, "output_count": 1 << 18}
    call = {"site": "a.py:1 (f)", "algorithm": "ring", "result": "done", "predicted_us": 4e6, "number": number}
    times = {"moving_us": moving_us, "waiting_us": waiting_us}
    return {"pid": 0, "args": {**shape, **call, **times, "ranks_of_nodes": [4], "processes": 1, **changed}}


def test_report(tmp_path):
    """Calls of two processes, each in the rows of two ranks; one of an op without prediction; one that has failed."""
    slow = [event(1, 9e6, 1e6)] * 2 + [event(2, 10e6, 2e6)] * 2 + [event(3, 14e6, 6e6)] * 2
    tokens = event(4, 1e6, 3e6, op="moe.dispatch", input_count=8, output_count=64, predicted_us=None)
    slow.append(event(5, 99e6, 1e6, result="failed"))
    path = tmp_path / "run.json"
    slow += [{**one, "pid": 1} for one in slow]
    path.write_text(json.dumps({"traceEvents": [*slow, tokens], "otherData": {"calls that the ring has dropped": 5}}))
    rows, notes = _roofline.report([path], limit_of=lambda shape: shape.size_bytes / 1e3)
    assert [(row.op, row.calls, row.size_bytes, row.copy_limit_us) for row in rows] == [
        ("psum", 3, 1 << 20, (1 << 20) / 1e3),
        ("moe.dispatch", 1, 32, 0.032),
    ]
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
    assert lines[0] == "4 calls, 46.000 s; ranks waited for each other in 12.000 s"
    assert [" ".join(line.split()) for line in lines if line.endswith(("site", "(f)")) or line.startswith("note")] == [
        "op ranks bytes calls wait us move us predicted copy limit total s algorithm, site",
        "psum 4 1048576 3 2000000.0 10000000.0 4000000.0 1048.6 42.000 ring, a.py:1 (f)",
        "moe.dispatch 4 32 1 3000000.0 1000000.0 - 0.0 4.000 ring, a.py:1 (f)",
        f"note: {notes[0]}",
    ]


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
    for algorithm in {"ring", "direct"} & set(jaxcomm.algorithms(op)) if op != "ppermute" and len(nodes) == 1 else ():
        assert sum(shape.traffic(algorithm).values()) == 4 * shape.bus_bytes(), algorithm
