"""Timelines as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

Source of the format: Trace Event Format, Google, 2016.
"""

from collections.abc import Iterator
from typing import Any

from jaxcomm.simulate.collectives import Simulated
from jaxcomm.simulate.step.result import Step
from jaxcomm.simulate.step.schedule import Timeline
from jaxcomm.simulate.step.tasks import Exchange, Kernel, Loop

_STREAMS = {1: "computation", 2: "collectives", 3: "loops"}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start_s: float, end_s: float, **arguments: Any) -> dict[str, Any]:
    span = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **span, "args": arguments}


def of_collective(found: Simulated) -> dict[str, Any]:
    """A process for each simulated rank, and one thread each for its processor, its queue and its waits."""
    events: list[dict[str, Any]] = []
    ranks = {entry.rank: entry.ranks for entry in found.timeline}
    for number, (rank, count) in enumerate(ranks.items()):
        name = f"rank {rank}" + (f", as {count - 1} others" if count > 1 else "")
        events.append(_named("process_name", number, 0, name))
        threads = {1: "processor", 2: "queue of the network", 3: "waits"}
        events += [_named("thread_name", number, thread, text) for thread, text in threads.items()]
        for entry in found.timeline:
            if entry.rank == rank:
                thread = 3 if not entry.name else 2 if entry.queued else 1
                events.append(
                    _slice(number, thread, entry.name or "wait", entry.start_s, entry.end_s, bytes=entry.bytes)
                )
    other = {"op": found.op, "algorithm": found.algorithm, "cluster": found.cluster, "time_s": found.time_s}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}


def _tasks(timeline: Timeline, at_s: float) -> Iterator[dict[str, Any]]:
    """Slices of all tasks; of a loop, those of the first iteration."""
    for run in timeline.runs:
        work, start_s, end_s = run.task.work, at_s + run.start_s, at_s + run.end_s
        if isinstance(work, Kernel):
            yield _slice(1, 1, work.name, start_s, end_s, flop=work.flops, bytes=work.bytes, site=work.site)
        elif isinstance(work, Exchange):
            name = f"{work.op} {','.join(work.axes)}"
            yield _slice(1, 2, name, start_s, end_s, elements=work.count, exposed_s=run.exposed_s, site=work.site)
        elif isinstance(work, Loop):
            yield _slice(1, 3, f"{work.name} x {work.trips}", start_s, end_s, site=work.site)
            if run.inside is not None:
                yield from _tasks(run.inside, start_s)


def of_step(found: Step) -> dict[str, Any]:
    """One process for all devices, and one thread each for both streams and for loops."""
    ranks = 1
    for size in found.mesh.values():
        ranks *= size
    events = [_named("process_name", 1, 0, f"each of {ranks} devices of {found.cluster}")]
    events += [_named("thread_name", 1, thread, name) for thread, name in _STREAMS.items()]
    events += _tasks(found.timeline, 0.0)
    other = {"cluster": found.cluster, "mesh": found.mesh, "time_s": found.time_s}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
