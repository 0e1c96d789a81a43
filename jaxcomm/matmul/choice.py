"""Which algorithm a collective matmul runs if the caller names none."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Names that the keyword `algorithm` accepts, besides "xla".
ALGORITHMS = ("unfused", "direct", "ring")

# Platforms where a transfer runs beside a product. On GPUs, jaxcomm's calls and the products share one stream. On CPUs,
# they share the processors: benchmarks/README.md has measurements.
OVERLAPPING: frozenset[str] = frozenset()

# A product on a GPU works in tiles of this size. Fewer tiles than multiprocessors leave some idle. On 8 H100 with 132
# multiprocessors each, chunks of 512 rows and 6656 columns (104 tiles) were published to gain 10 percent, and chunks of
# 256 rows to lose (meta-pytorch/kraken#2). The number is a constant, so that all ranks choose alike.
TILE_ROWS, TILE_COLUMNS = 128, 256
ENOUGH_TILES = 104
# On an H100 (990 TFLOP/s in bf16, NVLink with 450 GB/s), the transfer of a block takes 2200 / width of the time of its
# products. Overlap gains this fraction at most; up to this width it is at least a tenth.
LARGEST_WIDTH = 22_000


class Size(NamedTuple):
    """Size of a collective matmul.

    Attributes:
      tiles: tiles of the products with one chunk.
      width: multiplications per element that is sent.
    """

    tiles: int
    width: int


def _tiles(rows: int, columns: int) -> int:
    return math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)


def size_of_gather(x: Sequence[int], ys: Sequence[Sequence[int]], num_weights: int, chunks: int) -> Size:
    """Size of loops.gather.

    Args:
      x: shape of the rows of one rank.
      ys: shapes of the weights, then of the other arrays.
      num_weights: number of weights in ys.
      chunks: number of chunks of a block.
    """
    rows = math.prod(x[:-1]) // chunks
    tiles = [_tiles(rows if i < num_weights else x[-1], y[-1]) for i, y in enumerate(ys)]
    return Size(sum(tiles), sum(y[-1] for y in ys))


def size_of_scatter(terms: Sequence[tuple[Sequence[int], Sequence[int]]], parts: int) -> Size:
    """Size of loops.scatter.

    Args:
      terms: shapes of rows and weights of each product.
      parts: number of chunks of all blocks.
    """
    tiles = [_tiles(math.prod(x[:-1]) // parts, w[-1]) for x, w in terms]
    return Size(sum(tiles), sum(x[-1] for x, _ in terms))


def choose(size: Size, *, one_node: bool, overlaps: bool) -> str:
    """Returns the name of an algorithm.

    Args:
      size: size of the products.
      one_node: whether all ranks of a group are on one node.
      overlaps: whether transfers run beside products.
    """
    if not overlaps or size.tiles < ENOUGH_TILES or size.width > LARGEST_WIDTH:
        return "unfused"
    return "direct" if one_node else "ring"
