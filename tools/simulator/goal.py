"""Plans as schedules in GOAL, the text format that LogGOPSim reads.

Source of the format: Hoefler, Siebert, Lumsdaine, Group Operation Assembly Language, ICPP 2009,
doi 10.1109/ICPP.2009.70.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomm import _request
from jaxcomm._core import plan
from jaxcomm.simulate import collectives
from jaxcomm.simulate.cluster.model import Cluster

_MAX_STEPS = 10_000_000  # a few gigabytes
_SIGNAL = 0  # tag; data of each pair of ranks has tags of its own


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation of a rank.

    Attributes:
      kind: "send", "recv" or "calc".
      size: bytes of a message, or nanoseconds of a calculation.
      peer, tag: of a message.
      requires: positions of operations of the same rank that end before this one starts.
    """

    kind: str
    size: int
    peer: int = -1
    tag: int = 0
    requires: tuple[int, ...] = ()


Schedule = list[list[Op]]  # by rank


class _Writer:
    """The operations of all ranks. A rank executes the steps of its plan one after the other."""

    def __init__(self, num_ranks: int) -> None:
        self.ops: Schedule = [[] for _ in range(num_ranks)]
        self.last: list[tuple[int, ...]] = [()] * num_ranks  # what the next step of a rank requires
        self.tags: collections.Counter[tuple[int, int]] = collections.Counter()

    def add(self, rank: int, op: Op) -> int:
        self.ops[rank].append(op)
        return len(self.ops[rank]) - 1

    def step(self, rank: int, kind: str, size: int, peer: int = -1, tag: int = 0, more: Iterable[int] = ()) -> None:
        self.last[rank] = (self.add(rank, Op(kind, size, peer, tag, (*self.last[rank], *more))),)

    def tag(self, src: int, dst: int) -> int:
        self.tags[src, dst] += 1
        return self.tags[src, dst]

    def get(self, rank: int, peer: int, size: int) -> None:
        """The peer sends when a request of one byte arrives."""
        ask, answer = self.tag(rank, peer), self.tag(peer, rank)
        self.step(rank, "send", 1, peer, ask)
        asked = self.add(peer, Op("recv", 1, rank, ask))
        self.add(peer, Op("send", size, rank, answer, (asked,)))
        self.step(rank, "recv", size, peer, answer)


def schedule(plans: Sequence[Any], item_bytes: float, copy: tuple[float, float]) -> Schedule:
    """The schedule of the plans of all ranks.

    A put is a message; the wait for the next signal of its sender requires its arrival. A get is a request and its
    answer. Signals are messages of one byte.

    Args:
      plans: by rank.
      item_bytes: of an element.
      copy: overhead (seconds) and rate (bytes per second) of copies and of the operands of sums.
    """
    writer = _Writer(len(plans))
    overhead_s, rate = copy
    before: collections.defaultdict[tuple[int, int], list[list[int]]] = collections.defaultdict(lambda: [[]])
    for rank, of_rank in enumerate(plans):  # a wait needs the puts of other ranks
        for step in of_rank.steps:
            if step.kind == "put":
                tag = writer.tag(rank, step.peer)
                arrived = Op("recv", max(1, round(step.count * item_bytes)), rank, tag)
                before[rank, step.peer][-1].append(writer.add(step.peer, arrived))
            elif step.kind == "signal":
                before[rank, step.peer].append([])
    waits: collections.Counter[tuple[int, int]] = collections.Counter()
    puts: collections.Counter[tuple[int, int]] = collections.Counter()
    for rank, of_rank in enumerate(plans):
        sources = of_rank.sources
        for step in of_rank.steps:
            size = max(1, round(step.count * item_bytes))
            calc_ns = round((overhead_s + step.count * item_bytes * max(1, step.num_sources) / rate) * 1e9)
            if step.kind == "signal":
                writer.step(rank, "send", 1, step.peer, _SIGNAL)
            elif step.kind == "wait":
                pair = (step.peer, rank)
                writer.step(rank, "recv", 1, step.peer, _SIGNAL, before[pair][waits[pair]])
                waits[pair] += 1
            elif step.kind == "put":
                puts[rank, step.peer] += 1
                writer.step(rank, "send", size, step.peer, puts[rank, step.peer])
            elif step.kind == "get":
                writer.get(rank, step.peer, size)
            else:
                operands = sources[step.first_source : step.first_source + step.num_sources]
                for place in operands:
                    if place.rank != rank:
                        writer.get(rank, place.rank, size)
                writer.step(rank, "calc", calc_ns)
    return writer.ops


def of(op: str, x: Any, axis_sizes: int | Sequence[int], *, cluster: Cluster, algorithm: str | None = None) -> Schedule:
    """The schedule of the plan that ``collective`` simulates for the same arguments. LL plans run step by step.

    Raises:
      ValueError: as ``collective``; the cluster has faults; or the plans have too many steps.
    """
    if cluster.faults:
        raise ValueError(f"{op}: a schedule has no faults, got {cluster.faults[0]}")
    sizes = _request.sizes_of(op, axis_sizes)
    n = math.prod(sizes)
    cluster = cluster.spread(n)
    choice, _, _ = collectives.resolve(op, x, n, cluster, algorithm=algorithm)
    channels = max(choice.num_channels, 1)
    if choice.cost.steps * n > _MAX_STEPS:
        raise ValueError(f"{op}: the schedule would have more than {_MAX_STEPS} steps; ask about fewer ranks")
    return schedule(plan.build(choice.request, choice.algorithm), choice.item_bytes * channels, cluster.copy)


def text(ops: Schedule) -> str:
    """The schedule as GOAL."""
    lines = [f"num_ranks {len(ops)}"]
    for rank, of_rank in enumerate(ops):
        lines.append(f"rank {rank} {{")
        for number, op in enumerate(of_rank):
            way = {"send": "to", "recv": "from"}.get(op.kind)
            message = f"{op.size}b {way} {op.peer} tag {op.tag}" if way else f"{op.size}"
            lines.append(f"l{number}: {op.kind} {message}")
        lines += [f"l{number} requires l{other}" for number, op in enumerate(of_rank) for other in op.requires]
        lines.append("}")
    return "\n".join(lines) + "\n"
