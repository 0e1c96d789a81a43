"""The report of a trace beside the copy limit and the prediction, from events written by hand."""

import json

import jax
import jax.numpy as jnp

import jaxcomm
from jaxcomm.recorder import _roofline


def event(number, moving_us, waiting_us, **changed):
    shape = {"op": "psum", "dtype": "float32", "item_bytes": 4, "input_count": 1 << 18, "output_count": 1 << 18}
    call = {"site": "a.py:1 (f)", "algorithm": "ring", "result": "done", "predicted_us": 4e6, "number": number}
    times = {"moving_us": moving_us, "waiting_us": waiting_us}
    return {"pid": 0, "args": {**shape, **call, **times, "ranks_of_nodes": [4], "processes": 1, **changed}}


def test_report(tmp_path):
    """Two calls of two processes, each in the rows of two ranks; one of an op without prediction."""
    slow = [event(1, 9e6, 1e6), event(1, 9e6, 1e6), event(2, 11e6, 3e6), event(2, 11e6, 3e6)]
    tokens = event(3, 1e6, 3e6, op="moe.dispatch", input_count=8, output_count=64, predicted_us=None)
    path = tmp_path / "run.json"
    slow += [{**one, "pid": 1} for one in slow]
    path.write_text(json.dumps({"traceEvents": [*slow, tokens], "otherData": {"calls that the ring has dropped": 5}}))
    rows, notes = _roofline.report([path], limit_of=lambda shape: shape.size_bytes / 1e3)
    assert [(row.op, row.calls, row.size_bytes, row.copy_limit_us) for row in rows] == [
        ("psum", 2, 1 << 20, (1 << 20) / 1e3),
        ("moe.dispatch", 1, 32, 0.032),
    ]
    assert (rows[0].moving_us, rows[0].waiting_us) == (10e6, 2e6)
    assert (rows[0].total_s, rows[0].waiting_s) == (24, 4)
    best = jaxcomm.explain("psum", jax.ShapeDtypeStruct((1 << 18,), jnp.float32), 4)
    advice = "\n".join(rows[0].advice)
    assert f"algorithm={best.algorithm!r} is predicted to take {1e6 * best.predicted_time_s:.0f} us" in advice
    assert "2.5 times the prediction" in advice and "steps take longer than bytes" in advice
    assert "psum_start beside computations hides up to 20000.0 ms" in advice and "wait" not in advice
    waits, far = rows[1].advice
    assert waits.startswith("ranks wait for each other 3 times as long") and far == "31250000 times the copy limit"
    assert "without the first 5 calls" in notes[0]
    assert "a.py:1" in _roofline.text(rows, notes)
