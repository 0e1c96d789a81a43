"""Which plan a collective would run, why, and what it should cost."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm import _check, _lowering, figures
from jaxcomm._core import plan

# Public name (jax.lax) -> native name (ffi/collectives.def).
NATIVE = {
    "all_to_all": "all_to_all",
    "all_gather": "all_gather",
    "psum": "all_reduce",
    "pmean": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
    "barrier": "barrier",
}


def _native(op: str) -> str:
    if op not in NATIVE:
        raise ValueError(f"op must be one of {', '.join(NATIVE)}, got {op!r}")
    return NATIVE[op]


def algorithms(op: str) -> tuple[str, ...]:
    """Names that the keyword ``algorithm`` of an op takes, in order of preference.

    Not every algorithm fits every group: recursive halving wants a power of two of ranks, a hierarchical plan several
    nodes of several ranks.

    Raises:
      ValueError: no such op.
    """
    return tuple(name for name, _ in plan.algorithms(_native(op)))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One choice of the selection table. ``str()`` gives a text for people, ``steps_text`` the plan itself.

    Attributes:
      op: public name.
      algorithm: name of the plan chosen.
      reason: why.
      source: where the algorithm comes from.
      num_nodes, ranks_per_node: the group, as the planner sees it.
      input_bytes, output_bytes: buffers of one rank.
      steps: of the rank that takes longest.
      scratch_bytes: of each rank.
      messages, bytes, signals: initiated by the rank that takes longest, by link class ("self", "node", "network").
      predicted_time_s: by the cost model of docs/algorithms.md.
    """

    op: str
    algorithm: str
    reason: str
    source: str
    num_nodes: int
    ranks_per_node: int
    input_bytes: int
    output_bytes: int
    steps: int
    scratch_bytes: int
    messages: dict[str, int]
    bytes: dict[str, int]
    signals: dict[str, int]
    predicted_time_s: float
    _request: Any = dataclasses.field(repr=False, compare=False)

    def steps_text(self, rank: int = 0) -> str:
        """The plan of one rank, a step a line: buffers by rank, offsets and counts in elements."""
        return str(plan.build(self._request, self.algorithm)[rank])

    def __str__(self) -> str:
        links = [
            f"  {name:8} {self.messages[name]:6} messages {self.bytes[name]:14} bytes {self.signals[name]:6} signals"
            for name in self.messages
        ]
        return "\n".join(
            [
                f"{self.op} over {self.num_nodes} node(s) of {self.ranks_per_node} rank(s): "
                f"{self.input_bytes} -> {self.output_bytes} bytes per rank",
                f"algorithm {self.algorithm} ({self.source})",
                f"reason    {self.reason}",
                f"steps     {self.steps}, scratch {self.scratch_bytes} bytes",
                *links,
                f"predicted {self.predicted_time_s * 1e6:.1f} us",
            ]
        )


def explain(
    op: str,
    x: Any,
    axis_sizes: int | Sequence[int],
    *,
    algorithm: str | None = None,
    source: int = 0,
    perm: Sequence[tuple[int, int]] | None = None,
    reach: str = "process",
    ranks_per_node: int | None = None,
) -> Explanation:
    """Tells which plan an op would run, why, and what it should cost.

    Args:
      op: public name, such as "all_to_all" or "psum".
      x: operand of one rank: an array or a jax.ShapeDtypeStruct. Ignored for "barrier".
      axis_sizes: size of the named axis, or of each axis of the tuple, outermost first.
      algorithm: as in the op.
      source: rank that broadcasts (pbroadcast).
      perm: as in ppermute; None means a shift by one.
      reach: how the ranks reach each other: "process" (devices of one process), "node" (of several processes on a node)
        or "network" (of several nodes).
      ranks_per_node: of the group; by default the innermost of several axes is a node.

    Returns:
      An Explanation; print it, or read its fields.

    Raises:
      ValueError: unknown op, algorithm or reach, or sizes that don't fit.
      RuntimeError: with several processes, the coordination service does not answer.
    """
    native = _native(op)
    _check.algorithm(op, native, algorithm)
    sizes = (axis_sizes,) if isinstance(axis_sizes, int) else tuple(axis_sizes)
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"{op}: axis_sizes must be positive, got {axis_sizes!r}")
    n = math.prod(sizes)
    ranks_per_node = ranks_per_node or _lowering.ranks_per_node(sizes, None)
    if n % ranks_per_node:
        raise ValueError(f"{op}: {n} ranks are not nodes of {ranks_per_node}")
    count, item_bytes = (0, 1) if op == "barrier" else (math.prod(x.shape), np.dtype(x.dtype).itemsize)
    if native in ("all_to_all", "reduce_scatter"):
        if count % n:
            raise ValueError(f"{op}: {count} elements do not divide into {n} equal blocks")
        count //= n
    source_of = []
    if native == "permute":
        source_of = [-1] * n
        for src, dst in perm if perm is not None else [(r, (r + 1) % n) for r in range(n)]:
            source_of[dst] = src
    request = plan.Request(
        native, n // ranks_per_node, ranks_per_node, count, root=source, source_of=source_of,
        all_addressable=reach != "network", pull=reach != "process",
    )  # fmt: skip
    figures.load()
    choice = plan.select(request, algorithm or "", item_bytes, plan.machine_of(reach, n, ranks_per_node))
    if choice.algorithm is None:
        raise ValueError(f"{op}: {choice.reason}")
    cost = choice.cost
    links = {"self": cost.self, "node": cost.node, "network": cost.network}
    return Explanation(
        op=op,
        algorithm=choice.algorithm,
        reason=choice.reason,
        source=dict(plan.algorithms(native))[choice.algorithm],
        num_nodes=request.num_nodes,
        ranks_per_node=ranks_per_node,
        input_bytes=request.input_count * item_bytes,
        output_bytes=request.output_count * item_bytes,
        steps=cost.steps,
        scratch_bytes=cost.scratch_bytes,
        messages={name: traffic.messages for name, traffic in links.items()},
        bytes={name: traffic.bytes for name, traffic in links.items()},
        signals={name: traffic.signals for name, traffic in links.items()},
        predicted_time_s=cost.time_s,
        _request=choice.request,
    )
