"""The kernel as a function of JAX, to be called inside jit(shard_map) on GPUs."""

import ctypes
import functools
import os

import jax
import jax.numpy as jnp
from jax import lax

import jaxcomm


@functools.cache
def register(library: str | os.PathLike) -> None:
    """Loads the library that CMake has built and registers its handlers. Call it once, before the first use."""
    loaded = ctypes.CDLL(os.fspath(library))
    jaxcomm.register_ffi_target(
        "token_dispatch", loaded, initialize="TokenDispatchInitialize", execute="TokenDispatchExecute"
    )


def token_dispatch(x: jax.Array, to: jax.Array, axis_name):
    """Sends each row to a rank.

    Args:
      x: (tokens, width), this rank's rows, of any type.
      to: (tokens,), integers: the rank of each row, from 0 to ranks - 1.
      axis_name: mesh axis, or tuple of axes: the ranks.

    Returns:
      (ranks, tokens, width): rows from each rank, in the order of that rank, then zeros; and (ranks,), their numbers.
    """
    results = jax.eval_shape(lambda x, to: reference(x, to, axis_name), x, to)  # also the axes over which they vary
    order = jnp.argsort(to, stable=True).astype(jnp.int32)
    ranks = jnp.arange(lax.axis_size(axis_name))
    begin = jnp.sum(to[None] < ranks[:, None], axis=1, dtype=jnp.int32)
    return jaxcomm.ffi_call("token_dispatch", results, axis_name)(x, order, begin)


def reference(x: jax.Array, to: jax.Array, axis_name):
    """The same function in plain JAX."""
    ranks = jnp.arange(lax.axis_size(axis_name))
    mine = to[None] == ranks[:, None]  # [rank, token]
    place = jnp.where(mine, jnp.cumsum(mine, axis=1) - 1, x.shape[0])
    out = jnp.zeros((ranks.size, *x.shape), x.dtype).at[ranks[:, None], place].set(x[None], mode="drop")
    counts = jnp.sum(mine, axis=1, dtype=jnp.int32)
    return (
        lax.all_to_all(out, axis_name, 0, 0, tiled=True),
        lax.all_to_all(counts, axis_name, 0, 0, tiled=True),
    )
