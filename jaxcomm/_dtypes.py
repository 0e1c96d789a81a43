"""Element types in which data is sent and reduced."""

from typing import Any

import jax.numpy as jnp
import numpy as np

# XLA:CPU packs elements smaller than a byte. They are sent as a type of one byte that holds every value.
_IN_BYTES = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float8_e4m3fn,
}


def in_bytes(dtype: Any) -> Any:
    """The type in which elements of this type are sent."""
    return _IN_BYTES.get(str(dtype), dtype)


# Element types that the executors can't reduce -> types to reduce in.
_WIDER = {
    "int2": np.int32,
    "int4": np.int32,
    "uint2": np.uint32,
    "uint4": np.uint32,
    "float4_e2m1fn": np.float32,
    "float8_e8m0fnu": np.float32,
}


def to_reduce(dtype: Any) -> Any:
    """The type in which elements of this type are reduced."""
    return _WIDER.get(str(dtype), dtype)


def accumulator_type(dtype: Any) -> Any:
    """The type in which products and rows of this type are added."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(jnp.int32) if dtype == jnp.bool_ else jnp.dtype(dtype)
