"""Recorded calls as a Chrome trace."""

import json
from typing import Any

from jaxcomm.recorder import _file


def trace(ring: _file.Ring, first: int) -> str:
    """The calls from this number on, as JSON. A row per group and per number of calls at the same time."""
    calls = [call for call in ring.calls if call.number >= first and call.ended_ns]
    dropped = max(min((call.number for call in ring.calls), default=first) - first, 0)
    groups = {call.group.hash: call.group for call in calls}
    pid, events = ring.process, list[dict[str, Any]]()
    events.append(_meta("process_name", pid, 0, f"process {pid} on {ring.header['host']}"))
    for row, group in enumerate(groups.values()):
        events.append(_meta("thread_name", pid, row, f"ranks {_short(group.ranks)}"))
        for call in calls:
            if call.group.hash == group.hash:
                events += _events(call, pid, row)
    return json.dumps({"traceEvents": events, "otherData": {"calls that the ring has dropped": dropped}})


def _meta(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}


def _short(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")


def _events(call: _file.Call, pid: int, row: int) -> list[dict[str, Any]]:
    """The call, and inside it the time until all ranks had arrived."""
    op, _, place = call.site.text.partition(" at ")
    bytes_ = call.input_count * call.item_bytes
    moving_ns = max(call.ended_ns - max(call.started_ns, call.running_ns), 1)
    arguments = {
        "site": place,
        "bytes": bytes_,
        "dtype": call.dtype,
        "algorithm": call.site.algorithm,
        "sequence": call.sequence,
        "result": call.phase,
        "algbw_GB_per_s": round(bytes_ / moving_ns, 3),
    }
    spans = [(op, call.arrived_ns, call.ended_ns, arguments)]
    waited_until = max(call.started_ns, call.running_ns)
    if waited_until > call.arrived_ns:
        spans.append(("waits for ranks", call.arrived_ns, waited_until, {}))
    return [
        {"ph": "X", "name": name, "pid": pid, "tid": row, "ts": t0 / 1e3, "dur": (t1 - t0) / 1e3, "args": args}
        for name, t0, t1, args in spans
    ]
