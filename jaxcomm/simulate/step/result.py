"""The predicted time of a step and of its collectives, as data and as text."""

import dataclasses
import math
from typing import Any

from jaxcomm.simulate import collectives
from jaxcomm.simulate.step.schedule import Timeline


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of the step; equal calls of one place in the program are one row.

    Attributes:
      site: call site.
      op, axes, ranks, bytes: public name, mesh axes, size of a group, bytes of the operand of one rank.
      count: executions in a step.
      time_s: of one execution.
      exposed_s: of all executions, without computation at the same time.
      simulated: result of the simulation of one execution.
    """

    site: str
    op: str
    axes: tuple[str, ...]
    ranks: int
    bytes: int
    count: int
    time_s: float
    exposed_s: float
    simulated: collectives.Simulated

    @property
    def total_s(self) -> float:
        return self.count * self.time_s


@dataclasses.dataclass(frozen=True)
class Step:
    """The predicted time of a step. ``str()`` gives a summary.

    Attributes:
      cluster: name of the cluster.
      mesh: sizes of the axes.
      time_s: predicted time.
      interval: (low, high), seconds; a guess.
      least_s, serial_s: no order of the tasks is faster than the first; the second is all tasks one after the other.
      compute_s, communication_s: busy time of the two streams.
      exposed_s: communication without computation at the same time.
      memory_bytes: an estimate of what a device holds at once (``memory.peak_bytes``); None for HLO.
      capacity_bytes: memory of a device; None if the cluster does not say.
      flops, bytes: of the kernels of one device: operations of products, and bytes of memory.
      collectives: by exposed time, largest first.
      why: what limits the time.
      notes: assumptions, with the number of places.
      origins: number of figures of each origin.
      timeline: tasks in time.
    """

    cluster: str
    mesh: dict[str, int]
    time_s: float
    interval: tuple[float, float]
    least_s: float
    serial_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    memory_bytes: float | None
    capacity_bytes: float | None
    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    why: str
    notes: tuple[str, ...]
    origins: dict[str, int]
    timeline: Timeline = dataclasses.field(repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        """Plain data, without the timeline."""
        result = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "timeline"}
        result["collectives"] = [
            {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "simulated"}
            | {key: getattr(c.simulated, key) for key in ("algorithm", "bottleneck", "interval")}
            for c in self.collectives
        ]
        return result

    def _memory(self) -> list[str]:
        if self.memory_bytes is None or self.capacity_bytes is None:
            return []
        fits = "" if self.memory_bytes <= self.capacity_bytes else ": THE STEP DOES NOT FIT"
        return [f"memory         {self.memory_bytes / 1e9:,.3g} GB of {self.capacity_bytes / 1e9:,.4g} GB{fits}"]

    def __str__(self) -> str:
        time = collectives.time_text
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        share = self.exposed_s / self.time_s if self.time_s else 0.0
        lines = [
            f"step on {math.prod(self.mesh.values())} ranks of {self.cluster} ({sizes})",
            f"time           {time(self.time_s)}, interval {time(self.interval[0])} to {time(self.interval[1])}",
            f"bounds         {time(self.least_s)} for any order of the tasks, {time(self.serial_s)} in series",
            f"computation    {time(self.compute_s)}: {self.flops:.4g} flop in products, {self.bytes:.4g} bytes moved",
            f"communication  {time(self.communication_s)}, of which {time(self.exposed_s)} ({share:.0%} of the step) "
            "without computation",
            *self._memory(),
            f"limited by     {self.why}",
            "",
            f"{'collective':18} {'axes':14} {'ranks':>7} {'bytes':>12} {'count':>6} {'time':>10} {'exposed':>10}  "
            "algorithm, link, site",
        ]
        for c in self.collectives:
            lines.append(
                f"{c.op:18} {','.join(c.axes):14} {c.ranks:7} {c.bytes:12} {c.count:6} {time(c.time_s):>10} "
                f"{time(c.exposed_s):>10}  {c.simulated.algorithm}, {c.simulated.bottleneck or 'no link'}, {c.site}"
            )
        lines += ["", *(f"assumed: {note}" for note in self.notes)]
        counts = ", ".join(f"{count} {origin}" for origin, count in self.origins.items())
        lines.append(f"This prediction rests on no measurement of a step or of jaxcomm ({counts}).")
        lines.append("The interval is a guess.")
        return "\n".join(lines)
