"""Random slices for the tests of ragged_all_to_all, and the call of it in a test."""

import numpy as np
from harness import OURS

VECTORS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def pack(rng, sizes, gap):
    """Offsets at which slices of these sizes lie in random order, with gaps of up to `gap` rows.

    An empty slice is far outside, which has no effect.
    """
    offsets, row = np.zeros(len(sizes), np.int32), 0
    for i in rng.permutation(len(sizes)):
        row += rng.integers(gap + 1)
        offsets[i] = row
        row += sizes[i]
    return np.where(sizes > 0, offsets, 127)


def slices(rng, n, per_pair, *, largest=3, gap=1, overlap=False):
    """Vectors of n ranks, each (n, N), and the numbers of rows that they need: of operands and of outputs.

    A third of the slices is empty. With `overlap`, slices start at random rows of the operand.
    """
    many = n * per_pair
    sizes = rng.integers(0, largest + 1, (n, n, per_pair)) * (rng.random((n, n, per_pair)) < 0.67)
    sizes = sizes.astype(np.int32)
    rows = many * (largest + gap) + largest
    if overlap:
        inputs = rng.integers(0, largest + 2, (n, many)).astype(np.int32)
    else:
        inputs = np.stack([pack(rng, sizes[r].ravel(), gap) for r in range(n)])
    received = sizes.swapaxes(0, 1)
    outputs = np.stack([pack(rng, received[r].ravel(), gap) for r in range(n)]).reshape(n, n, per_pair)
    vectors = (inputs, sizes.reshape(n, many), outputs.swapaxes(0, 1).reshape(n, many), received.reshape(n, many))
    return vectors, rows, rows + 2


def call(operand, output, vectors, axes, **more):
    return OURS.ragged_all_to_all(operand, output, *vectors, axis_name=axes, **more)
