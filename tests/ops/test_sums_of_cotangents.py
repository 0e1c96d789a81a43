"""Cotangents of what several ranks have read: they are added in float32 and rounded once.

256 + 7 * 1 is 264 in bfloat16. Rounded after each sum, it stays 256.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm

N = 8
WEIGHTS = jnp.array([256, *[1] * (N - 1)], jnp.bfloat16)


def reshard(x):
    """Every rank gets all elements."""
    return jaxcomm.reshard_in(x, "i", P("i"), P())


def ragged(x):
    """Every rank gets the row of rank 0, whose slices overlap."""
    first = jax.lax.axis_index("i") == 0
    ones, zeros = jnp.ones(N, jnp.int32), jnp.zeros(N, jnp.int32)
    received = zeros.at[0].set(1)
    return jaxcomm.ragged_all_to_all(
        x, jnp.zeros_like(x), zeros, jnp.where(first, ones, 0), zeros, received, axis_name="i"
    )


@pytest.mark.parametrize("transfer", [reshard, ragged])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_they_are_rounded_once(transfer, dtype):
    mesh = jax.make_mesh((N,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    def gradients(x, weight):
        return jax.grad(lambda x: jnp.sum(transfer(x) * weight))(x)

    found = jax.jit(gradients)(jnp.ones(N, dtype), WEIGHTS.astype(dtype))
    expected = 264 if dtype == "bfloat16" else 263
    np.testing.assert_array_equal(np.asarray(found, np.float32)[: N if transfer is reshard else 1], expected)
