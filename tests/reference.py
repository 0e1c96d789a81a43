"""NumPy oracles: the definition of each collective, on the blocks of one group in rank order."""

import functools
import itertools

import ml_dtypes  # noqa: F401  (registers the small floats with NumPy)
import numpy as np


def groups_of(sizes, axes, axis_index_groups=None):
    """The groups over `axes` of a mesh {axis: size}: lists of coordinates, in rank order, outermost axis first."""
    found = {}
    for coordinates in itertools.product(*map(range, sizes.values())):
        at = dict(zip(sizes, coordinates, strict=True))
        rest = tuple(at[a] for a in sizes if a not in axes)
        found.setdefault(rest, {})[tuple(at[a] for a in axes)] = coordinates
    rows = [[members[key] for key in sorted(members)] for members in found.values()]
    if axis_index_groups is None:
        return rows
    return [[row[i] for i in group] for row in rows for group in axis_index_groups]


def on_mesh(oracle, x, sizes, axes, axis_index_groups=None, **arguments):
    """Applies an oracle to every group of a mesh {axis: size}; x and the result are (*sizes, *block)."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    results = {}
    for group in groups_of(sizes, axes, axis_index_groups):
        results.update(zip(group, oracle([x[at] for at in group], **arguments), strict=True))
    rows = np.stack([results[at] for at in sorted(results)])
    return rows.reshape(*sizes.values(), *rows.shape[1:])


def all_to_all(blocks, split_axis, concat_axis, tiled=False):
    n = len(blocks)
    if tiled:
        pieces = [np.split(block, n, split_axis) for block in blocks]
        return [np.concatenate([piece[rank] for piece in pieces], concat_axis) for rank in range(n)]
    return [np.stack([np.take(block, rank, split_axis) for block in blocks], concat_axis) for rank in range(n)]


def all_gather(blocks, axis=0, tiled=False):
    return [(np.concatenate if tiled else np.stack)(blocks, axis)] * len(blocks)


def small(dtype):
    """Whether a type is a float of 16 bits or less, which is accumulated in f32."""
    return "float" in np.dtype(dtype).name and np.dtype(dtype).itemsize <= 2


def reduce(blocks, operation):
    """Sum in rank order, in the element type, or in f32 with one rounding."""
    dtype = blocks[0].dtype
    wide = [block.astype(np.float32) if small(dtype) else block for block in blocks]
    with np.errstate(over="ignore", invalid="ignore"):
        return functools.reduce(operation, wide).astype(dtype)


def psum(blocks):
    if blocks[0].dtype == np.bool_:
        blocks = [block.astype(np.int32) for block in blocks]
    return [reduce(blocks, np.add)] * len(blocks)


def pmean(blocks):
    total = psum(blocks)[0]
    if "int" in total.dtype.name:
        total = total.astype(np.float64 if total.dtype.itemsize == 8 else np.float32)
    return [(total / len(blocks)).astype(total.dtype)] * len(blocks)


def pmax(blocks):
    return [reduce(blocks, np.maximum)] * len(blocks)


def pmin(blocks):
    return [reduce(blocks, np.minimum)] * len(blocks)


def psum_scatter(blocks, scatter_dimension=0, tiled=False):
    n, total = len(blocks), reduce(blocks, np.add)
    if tiled:
        return np.split(total, n, scatter_dimension)
    return [np.take(total, rank, scatter_dimension) for rank in range(n)]


def ppermute(blocks, perm):
    source_of = {destination: source for source, destination in perm}
    return [blocks[source_of[r]] if r in source_of else np.zeros_like(blocks[r]) for r in range(len(blocks))]


def pbroadcast(blocks, source):
    return [blocks[source]] * len(blocks)


def barrier(blocks):
    return blocks


def ragged_all_to_all(operands, outputs, input_offsets, send_sizes, output_offsets):
    """Slice by slice. The lists of vectors have one entry per rank."""
    results, n = [np.array(output) for output in outputs], len(operands)
    for sender, operand in enumerate(operands):
        for i, size in enumerate(send_sizes[sender]):
            row, to = input_offsets[sender][i], i // (len(send_sizes[sender]) // n)
            at = output_offsets[sender][i]
            results[to][at : at + size] = operand[row : row + size]
    return results
