"""Sums of subnormals: XLA's threads flush them to zero, the worker threads that add beside them don't."""

import jax
import numpy as np
import pytest
from harness import on_ranks

import jaxcomm


@pytest.mark.parametrize("op", ["psum", "psum_scatter"])
@pytest.mark.parametrize("count", [8, 80_000])  # by the thread that comes last; by worker threads too
def test_sums_of_subnormals_are_kept(line, op, count):
    (axis,) = line.axis_names
    # As bits, because NumPy and JAX may flush what they convert: those of a subnormal are its multiple of the smallest.
    bits = (np.arange(8 * count).reshape(8, count) % 97).astype(np.uint32)
    expected = bits.sum(axis=0, dtype=np.uint32)
    assert expected.max() < np.float32(np.finfo(np.float32).tiny).view(np.uint32)

    def body(block):
        if op == "psum":
            return jaxcomm.psum(block, axis)
        return jaxcomm.psum_scatter(block, axis, tiled=True)

    sums = np.asarray(jax.jit(on_ranks(body, line))(bits.view(np.float32))).view(np.uint32)
    for rank in range(8):
        own = slice(None) if op == "psum" else slice(rank * count // 8, (rank + 1) * count // 8)
        np.testing.assert_array_equal(sums[rank], expected[own])
