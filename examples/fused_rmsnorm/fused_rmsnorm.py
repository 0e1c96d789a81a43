"""The kernel as a function of JAX, to be called inside jit(shard_map) on GPUs."""

import ctypes
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomm

_TYPES = {"float32": "F32", "bfloat16": "BF16"}


@functools.cache
def register(library: str | os.PathLike) -> None:
    """Loads the library that CMake has built and registers its handlers. Call it once, before the first use."""
    loaded = ctypes.CDLL(os.fspath(library))
    for suffix in _TYPES.values():
        jaxcomm.register_ffi_target(
            f"fused_rmsnorm_{suffix}",
            loaded,
            initialize=f"FusedRmsnormInitialize{suffix}",
            execute=f"FusedRmsnormExecute{suffix}",
        )


def fused_rmsnorm(x: jax.Array, residual: jax.Array, weight: jax.Array, axis_name, epsilon: float = 1e-6):
    """Adds x of all ranks to the residual and normalises the rows of the result.

    Args:
      x: (tokens, hidden), this rank's part of the sum; float32 or bfloat16.
      residual: (tokens, hidden), the same on all ranks.
      weight: (hidden,), the same on all ranks.
      axis_name: mesh axis, or tuple of axes: the ranks.
      epsilon: is added to the mean of the squares.

    Returns:
      The normalised rows and the new residual, both of x's shape and the same on all ranks.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2
    call = jaxcomm.ffi_call(f"fused_rmsnorm_{_TYPES[str(x.dtype)]}", results, axis_name, operand_windows=[0])
    return call(x, residual, weight, epsilon=np.float32(epsilon))


def reference(x: jax.Array, residual: jax.Array, weight: jax.Array, axis_name, epsilon: float = 1e-6):
    """The same function in plain JAX."""
    total = residual.astype(jnp.float32) + lax.psum(x.astype(jnp.float32), axis_name)
    new_residual = total.astype(x.dtype)
    rows = new_residual.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(rows * rows, axis=1, keepdims=True) + epsilon)
    return (rows * scale * weight.astype(jnp.float32)).astype(x.dtype), new_residual
