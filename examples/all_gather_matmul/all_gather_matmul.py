"""The kernel as a function of JAX, to be called inside jit(shard_map) on GPUs."""

import ctypes
import functools
import os

import jax
import jax.numpy as jnp
from jax import lax

import jaxcomm

_TYPES = {"float32": "F32", "bfloat16": "BF16"}


@functools.cache
def register(library: str | os.PathLike) -> None:
    """Loads the library that CMake has built and registers its handlers. Call it once, before the first use."""
    loaded = ctypes.CDLL(os.fspath(library))
    for suffix in _TYPES.values():
        jaxcomm.register_ffi_target(
            f"all_gather_matmul_{suffix}",
            loaded,
            initialize=f"AllGatherMatmulInitialize{suffix}",
            execute=f"AllGatherMatmulExecute{suffix}",
        )


def all_gather_matmul(x: jax.Array, w: jax.Array, axis_name):
    """Multiplies the rows of all ranks by this rank's matrix.

    Args:
      x: (tokens, hidden), this rank's rows; float32 or bfloat16.
      w: (hidden, columns), of x's type; each rank may have its own.
      axis_name: mesh axis, or tuple of axes: the ranks.

    Returns:
      (ranks * tokens, columns), of x's type. Sums are in float32.
    """
    if w.dtype != x.dtype:
        raise TypeError(f"all_gather_matmul: w has type {w.dtype}, expected that of x: {x.dtype}")
    result = jax.eval_shape(lambda x, w: reference(x, w, axis_name), x, w)  # also the axes over which it varies
    return jaxcomm.ffi_call(f"all_gather_matmul_{_TYPES[str(x.dtype)]}", result, axis_name)(x, w)


def reference(x: jax.Array, w: jax.Array, axis_name):
    """The same function in plain JAX."""
    rows = lax.all_gather(x, axis_name, tiled=True)
    return jnp.matmul(rows, w, preferred_element_type=jnp.float32, precision="highest").astype(x.dtype)
