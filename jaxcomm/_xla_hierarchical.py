"""algorithm="xla_hierarchical": collectives composed of XLA's own, inside nodes and between them.

A group of G nodes with L ranks each is divided twice. A node group has the ranks of one node. A rail group has the
ranks with the same position in every node. Each composition calls XLA's collectives over the node groups and over the
rail groups. Only the rail groups send between nodes, and they share this traffic equally. docs/reference/algorithms.md
lists the stages.

A composition has the operand, the result and the parameters of the primitive with its name.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomm import _compat
from jaxcomm._typing import AxisNames, Groups

NAME = "xla_hierarchical"
# A chunk must take longer than the start of a collective, tens of microseconds on GPUs. The numbers are estimates: no
# machine with two networks has measured them.
_MIN_CHUNK_BYTES, _MAX_CHUNKS = 8 << 20, 4


@dataclasses.dataclass(frozen=True)
class Levels:
    """Node groups and rail groups of all groups of a call.

    Attributes:
      axes: mesh axes of the call, outermost first.
      nodes: the ranks of each node, as axis_index_groups over the axes.
      rails: the ranks of each rail, as axis_index_groups over the axes.
    """

    axes: AxisNames
    nodes: tuple[tuple[int, ...], ...]
    rails: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(axes: AxisNames, num_ranks: int, groups: Groups, ranks_per_node: int) -> "Levels":
        """The levels of a call over axes of `num_ranks` positions. Nodes are `ranks_per_node` consecutive ranks."""
        members = groups or (tuple(range(num_ranks)),)
        starts = range(0, len(members[0]), ranks_per_node)
        return Levels(
            axes,
            nodes=tuple(group[start : start + ranks_per_node] for group in members for start in starts),
            rails=tuple(group[local::ranks_per_node] for group in members for local in range(ranks_per_node)),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of nodes, and of ranks per node."""
        return len(self.rails[0]), len(self.nodes[0])


def all_to_all(x: Any, levels: Levels, *, split_axis: int, concat_axis: int) -> Any:
    """In the node, local rank l collects the blocks for rail l. The rail then delivers them."""
    num_nodes, local_ranks = levels.shape
    blocks = _split(x, split_axis, num_nodes * local_ranks)
    y = _pipeline(
        blocks.reshape(num_nodes, local_ranks, -1),
        [lambda x: _exchange(x, levels, levels.nodes, 1), lambda x: _exchange(x, levels, levels.rails, 0)],
        x.nbytes,
    )
    return _join(y.reshape(blocks.shape), concat_axis)


def all_gather(x: Any, levels: Levels, *, axis: int) -> Any:
    """Every rank gathers the blocks of its rail. The node then shares those of all rails."""
    num_ranks = math.prod(levels.shape)
    y = _pipeline(
        x.reshape(-1),
        [lambda x: _gather(x, levels, levels.rails, 0), lambda x: _gather(x, levels, levels.nodes, 1)],
        num_ranks * x.nbytes,
    )
    return _join(y.reshape(num_ranks, *x.shape), axis)


def reduce_scatter(x: Any, levels: Levels, *, axis: int) -> Any:
    """The node adds the blocks of each rail. The rail then adds the sums of the nodes."""
    num_nodes, local_ranks = levels.shape
    blocks = _split(x, axis, num_nodes * local_ranks)
    y = _pipeline(
        blocks.reshape(num_nodes, local_ranks, -1),
        [lambda x: _scatter_sum(x, levels, levels.nodes, 1), lambda x: _scatter_sum(x, levels, levels.rails, 0)],
        x.nbytes,
    )
    return y.reshape(blocks.shape[1:])


def all_reduce(x: Any, levels: Levels, *, reduce_op: Any) -> Any:
    """Each rank of a node reduces one piece for the node. The rail reduces this piece, and the node gathers all."""
    in_node, on_rail = _REDUCTIONS[reduce_op.name]
    y = _pipeline(
        _pieces(x, levels.shape[1]),
        [
            lambda x: in_node(x, levels),
            lambda x: on_rail(x, levels.axes, axis_index_groups=levels.rails),
            lambda x: _gather(x, levels, levels.nodes, 0),
        ],
        x.nbytes,
    )
    return y.reshape(-1)[: x.size].reshape(x.shape)


def broadcast(x: Any, levels: Levels, *, source: int) -> Any:
    """The source scatters one piece to every rank, over its node and then over all rails; an all_gather follows.

    XLA's collectives run in all nodes at the same time, so the other nodes scatter data that nobody uses.
    """
    num_nodes, local_ranks = levels.shape
    node, local = divmod(source, local_ranks)
    y = _pipeline(
        _pieces(x, num_nodes * local_ranks).reshape(local_ranks, num_nodes, -1),
        [
            lambda x: _exchange(x, levels, levels.nodes, 0)[local],
            lambda x: _exchange(x, levels, levels.rails, 0)[node],
            lambda x: _gather(x, levels, levels.rails, 0),
            lambda x: _gather(x, levels, levels.nodes, 0),
        ],
        x.nbytes,
    )
    return y.reshape(-1)[: x.size].reshape(x.shape)


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (all_to_all, all_gather, reduce_scatter, all_reduce, broadcast)
}


def _pipeline(x: Any, stages: Sequence[Callable[[Any], Any]], num_bytes: int) -> Any:
    """Runs the stages on each chunk of the last dimension of x and joins the results along the last dimension.

    A stage starts a chunk when it has finished the one before. So XLA may run two stages at once, one inside the nodes
    and one between them. The barriers also keep XLA from combining the collectives of a stage into one. XLA:CPU of
    jaxlib 0.10.2 ignores them.

    Args:
      num_bytes: of the largest buffer of a rank; determines the number of chunks.
    """
    width = x.shape[-1]
    num_chunks = max(1, min(_MAX_CHUNKS, num_bytes // _MIN_CHUNK_BYTES, width))
    bounds = [width * i // num_chunks for i in range(1, num_chunks)]
    chunks = jnp.split(x, bounds, axis=-1)
    for stage in stages:
        done: list[Any] = []
        for chunk in chunks:
            if done:
                chunk, done[-1] = lax.optimization_barrier((chunk, done[-1]))
            done.append(stage(chunk))
        chunks = done
    return jnp.concatenate(chunks, axis=-1) if num_chunks > 1 else chunks[0]


def _split(x: Any, axis: int, parts: int) -> Any:
    """(..., parts * d, ...) -> (parts, ..., d, ...)."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :]), axis, 0)


def _join(blocks: Any, axis: int) -> Any:
    """The inverse of _split."""
    parts, *block_shape = blocks.shape
    block_shape[axis] *= parts
    return jnp.moveaxis(blocks, 0, axis).reshape(block_shape)


def _pieces(x: Any, parts: int) -> Any:
    """The elements of x in rows of equal size, filled up with zeros: (parts, ...)."""
    return jnp.pad(x.reshape(-1), (0, -x.size % parts)).reshape(parts, -1)


def _exchange(x: Any, levels: Levels, groups: Groups, axis: int) -> Any:
    return lax.all_to_all(x, levels.axes, axis, axis, axis_index_groups=groups, tiled=True)


def _gather(x: Any, levels: Levels, groups: Groups, axis: int) -> Any:
    return lax.all_gather(x, levels.axes, axis_index_groups=groups, axis=axis)


def _scatter_sum(x: Any, levels: Levels, groups: Groups, axis: int) -> Any:
    return lax.psum_scatter(x, levels.axes, scatter_dimension=axis, axis_index_groups=groups)


# Names of reductions -> the reduce_scatter in a node, and the all_reduce of a rail. jax.lax scatters no maximum.
_REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SUM": (lambda x, levels: _scatter_sum(x, levels, levels.nodes, 0), _compat.psum_of_groups),
    "MAX": (lambda x, levels: jnp.max(_exchange(x, levels, levels.nodes, 0), axis=0), lax.pmax),
    "MIN": (lambda x, levels: jnp.min(_exchange(x, levels, levels.nodes, 0), axis=0), lax.pmin),
}
