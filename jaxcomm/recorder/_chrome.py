"""Recorded calls as a Chrome trace."""

import collections
import dataclasses
import functools
import json
from typing import Any

from jaxcomm.recorder import _file
from jaxcomm.recorder._predict import Shape


def trace(ring: _file.Ring, first: int, node_of: dict[int, str]) -> str:
    """The calls from this number on, as JSON. A row per rank of this process, and more for calls at the same time.

    node_of: nodes of processes, as far as known.
    """
    calls = [call for call in ring.calls if call.number >= first and call.ended_ns]
    dropped = max(min((call.number for call in ring.calls), default=first) - first, 0)
    pid = ring.process
    busy_until = collections.defaultdict[int, list[int]](list)  # by rank: ends of the latest calls of its rows
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    predicted = functools.cache(Shape.predicted)
    for call in sorted(calls, key=lambda call: call.arrived_ns):
        spans = _spans(call, Shape.of_call(call, node_of), predicted)
        for rank in call.group.ranks_of(pid):
            ends = busy_until[rank]
            row = next((row for row, end in enumerate(ends) if end <= call.arrived_ns), len(ends))
            ends[row : row + 1] = [call.ended_ns]
            rows.setdefault((rank, row), []).extend(spans)
    events = [_meta("process_name", pid, 0, f"process {pid} on {ring.header['host']}")]
    for tid, (rank, row) in enumerate(sorted(rows)):
        events.append(_meta("thread_name", pid, tid, f"rank {rank}" + (f" ({row + 1})" if row else "")))
        events += [{"ph": "X", "pid": pid, "tid": tid, **span} for span in rows[rank, row]]
    return json.dumps({"traceEvents": events, "otherData": {"calls that the ring has dropped": dropped}})


def _meta(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}


def _spans(call: _file.Call, shape: Shape, predicted: Any) -> list[dict[str, Any]]:
    """The call, and inside it the time until all ranks had arrived."""
    waited_until = max(call.started_ns, call.running_ns, call.arrived_ns)
    moving_ns = max(call.ended_ns - waited_until, 1)
    expected, bus_bytes = predicted(shape, call.site.algorithm), shape.bus_bytes()
    arguments = {
        **dataclasses.asdict(shape),
        "site": call.site.text.partition(" at ")[2],
        "bytes": call.input_count * call.item_bytes,
        "algorithm": call.site.algorithm,
        "number": call.number,
        "sequence": call.sequence,
        "result": call.phase,
        "waiting_us": (waited_until - call.arrived_ns) / 1e3,
        "moving_us": moving_ns / 1e3,
        "predicted_us": round(expected[1] * 1e6, 3) if expected else None,
        "busbw_GB_per_s": round(bus_bytes / moving_ns, 3) if bus_bytes is not None else None,
    }
    spans = [(shape.op, call.arrived_ns, call.ended_ns, arguments)]
    if waited_until > call.arrived_ns:
        spans.append(("waits for ranks", call.arrived_ns, waited_until, {}))
    return [{"name": name, "ts": t0 / 1e3, "dur": (t1 - t0) / 1e3, "args": args} for name, t0, t1, args in spans]
