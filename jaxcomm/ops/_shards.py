"""Shardings over the ranks of a group as boxes: what each rank has of a global array."""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcomm._core import plan
from jaxcomm._typing import AxisNames

# The box of each rank: begin and end of each dimension of the global array, after a dimension of size 1.
Boxes: TypeAlias = tuple[int, ...]
# The same of one rank, by dimension; () if it has no elements.
Box: TypeAlias = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class RankSharding:
    """A sharding over some ranks of a group, as jax.sharding.NamedSharding is one over devices.

    Attributes:
      ranks: array of ranks, each at most once: a mesh.
      axis_names: names of its dimensions.
      spec: the dimensions of an array that are sharded over them.
    """

    ranks: Any
    axis_names: Sequence[Hashable]
    spec: P


@dataclasses.dataclass(frozen=True)
class Side:
    """A checked sharding.

    Attributes:
      spec: as given.
      ranks: mesh of ranks.
      where: for each sharded dimension of an array, the dimensions of `ranks`, outermost first.
      num_ranks: ranks of the group.
      varying: axes of the call over which shards differ.
    """

    spec: P
    ranks: np.ndarray
    where: tuple[tuple[int, ...], ...]
    num_ranks: int
    varying: AxisNames

    @classmethod
    def of(cls, op: str, what: str, side: Any, axes: AxisNames, sizes: Sequence[int]) -> "Side":
        n = math.prod(sizes)
        if isinstance(side, P):
            side = RankSharding(np.arange(n).reshape(sizes), axes, side)
            varying = tuple(a for a in axes if a in _names(side.spec))
        elif isinstance(side, RankSharding):
            varying = axes
        else:
            raise TypeError(f"{op}: {what} must be a jax.sharding.PartitionSpec or a RankSharding, got {side!r}")
        ranks, names = np.asarray(side.ranks), tuple(side.axis_names)
        if ranks.dtype.kind not in "iu" or len(set(ranks.flat)) != ranks.size or not set(ranks.flat) <= set(range(n)):
            raise ValueError(f"{op}: ranks of {what} must be different integers from 0 to {n - 1}, got {ranks}")
        used = _names(side.spec)
        if len(names) != ranks.ndim or len(set(used)) != len(used) or not set(used) <= set(names):
            raise ValueError(
                f"{op}: {what} must name each axis of {names} at most once, and no other, got {side.spec} over ranks "
                f"of shape {ranks.shape}"
            )
        where = tuple(tuple(names.index(name) for name in _tuple(entry)) for entry in side.spec)
        return cls(side.spec, ranks, where, n, varying)

    def _parts(self, op: str, num_dimensions: int) -> tuple[int, ...]:
        if len(self.where) > num_dimensions:
            raise ValueError(f"{op}: {self.spec} has more entries than an array of {num_dimensions} dimensions")
        parts = [math.prod(self.ranks.shape[i] for i in axes) for axes in self.where]
        return tuple(parts + [1] * (num_dimensions - len(parts)))

    def whole(self, op: str, block: Sequence[int]) -> tuple[int, ...]:
        """Shape of the global array with full shards of shape `block`."""
        return tuple(size * parts for size, parts in zip(block, self._parts(op, len(block)), strict=True))

    def block(self, op: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the array of a shard."""
        return tuple(-(-size // parts) for size, parts in zip(shape, self._parts(op, len(shape)), strict=True))

    def boxes(self, shape: tuple[int, ...]) -> Boxes:
        block = self.block("", shape)
        boxes: list[Box] = [()] * self.num_ranks
        for index, rank in np.ndenumerate(self.ranks):
            parts = [
                int(np.ravel_multi_index([index[i] for i in axes], [self.ranks.shape[i] for i in axes])) if axes else 0
                for axes in self.where
            ]
            parts += [0] * (len(shape) - len(parts))
            rows = zip(shape, block, parts, strict=True)
            boxes[rank] = ((0, 1), *((min(i * step, size), min((i + 1) * step, size)) for size, step, i in rows))
        return numbers_of(boxes, 1 + len(shape))


def _tuple(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _names(spec: P) -> list[Any]:
    return [name for entry in spec for name in _tuple(entry)]


def numbers_of(boxes: Sequence[Box], ndim: int) -> Boxes:
    return tuple(int(number) for box in boxes for interval in box or ((0, 0),) * ndim for number in interval)


def boxes_of(numbers: Boxes, n: int) -> list[Box]:
    """The intervals of each rank; () for a rank without elements."""
    rows = np.array(numbers, np.int64).reshape(n, -1, 2).tolist()
    return [tuple((begin, end) for begin, end in row) if all(b < e for b, e in row) else () for row in rows]


def held_shape(shape: Sequence[int], num_dimensions: int) -> tuple[int, ...]:
    """Shape of an array as one of the dimensions of the boxes."""
    return (1,) * (num_dimensions - len(shape)) + tuple(shape)


def leaves_gaps(destinations: Boxes, result: tuple[int, ...], n: int) -> bool:
    """Whether an array of a result has other elements than those of its box."""
    sizes = [math.prod(end - begin for begin, end in box) if box else 0 for box in boxes_of(destinations, n)]
    return any(size < math.prod(result) for size in sizes)


def copies_of(boxes: Sequence[Box], alike: np.ndarray) -> dict[Box, list[int]]:
    """The boxes that are not empty, and the ranks that have each as a value of their own."""
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if box and alike[rank] == rank:
            found.setdefault(box, []).append(rank)
    return found


def part_of(box: Box, i: int, number: int) -> Box:
    """Part i of a box, cut along its longest dimension; () if nothing is left for it."""
    sizes = [end - begin for begin, end in box[1:]]
    if not sizes:
        return box if i == 0 else ()
    d = 1 + int(np.argmax(sizes))
    begin, end = box[d]
    step = -(-(end - begin) // number)
    cut = (min(begin + i * step, end), min(begin + (i + 1) * step, end))
    return (*box[:d], cut, *box[d + 1 :]) if cut[0] < cut[1] else ()


def rounds_of(sources: Boxes, destinations: Boxes, n: int) -> list[tuple[tuple[int, ...], list[tuple]]]:
    """The pieces that move at once, and their shape. A piece: (from, to, begin there, begin here); each rank once."""
    held, wanted = boxes_of(sources, n), boxes_of(destinations, n)
    cuts = [sorted({number for i in of for number in i}) for of in zip(*filter(None, held + wanted), strict=True)]

    def cells(box: Box) -> dict[int, Box]:
        """By their offsets in the order of the plan (ffi/plan/boxes.h)."""
        within = [[c for c in of if begin <= c <= end] for of, (begin, end) in zip(cuts, box, strict=True)]
        found = itertools.product(*(list(itertools.pairwise(c)) for c in within))
        by_offset, offset = {}, 0
        for cell in found:
            by_offset[offset] = cell
            offset += math.prod(end - begin for begin, end in cell)
        return by_offset

    by_offset = [[cells(box) if box else {} for box in side] for side in (held, wanted)]
    rounds: dict[tuple[Any, ...], list[tuple]] = {}
    request = plan.reshard_request("node", n, n, sources, destinations)
    request.chunk_count = 0
    for step in (step for of_rank in plan.build(request, "direct") for step in of_rank.steps):
        origin, target = step.src.rank, step.dst.rank
        cell = by_offset[0][origin][step.src.offset]
        begin, end = (
            tuple(c[0] - b[0] for c, b in zip(cell, box, strict=True)) for box in (held[origin], wanted[target])
        )
        shape = tuple(end - begin for begin, end in cell)
        for number in itertools.count():
            pieces = rounds.setdefault((shape, origin == target, number), [])
            if all(origin != p[0] and target != p[1] for p in pieces):
                pieces.append((origin, target, begin, end))
                break
    return [(key[0], pieces) for key, pieces in rounds.items()]
