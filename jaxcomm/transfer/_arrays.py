"""Arrays as the native endpoint takes them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._core import transfer as _native

Box = tuple[tuple[int, ...], tuple[int, ...]]  # begin and end of each dimension
ArrayArgument = tuple[int, int, Sequence[int], Sequence[int], int, Sequence[int]]

_ALIGNMENT = 64  # XLA takes memory with this alignment without a copy
_POOLED_BYTES = 64 << 10  # the allocator of the process uses smaller memory again


def can_send(dtype: Any) -> bool:
    """Whether bytes of this element type mean the same in another job: it is one of JAX, no object or structure."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and bool(jnp.isdtype(dtype, ("bool", "numeric")))


def argument(x: np.ndarray, page_dimension: int = -1, pages: Sequence[int] = ()) -> ArrayArgument:
    """An array for Endpoint.expose and Endpoint.read. The caller keeps `x` alive."""
    sizes = list(x.shape)
    if page_dimension >= 0:
        sizes[page_dimension] = len(pages)
    return x.ctypes.data, x.dtype.itemsize, sizes, x.strides, page_dimension, list(pages)


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """An array that JAX takes without a copy on CPUs."""
    dtype = np.dtype(dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes >= _POOLED_BYTES:
        return _native.allocate(size_bytes).view(dtype).reshape(shape)
    memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size_bytes].view(dtype).reshape(shape)
