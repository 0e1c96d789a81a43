"""Rows of several element types as one array of bytes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._dtypes import in_bytes


def row_bytes(x: Any) -> int:
    """Bytes that a row of x takes when it travels."""
    return math.prod(x.shape[1:]) * jnp.dtype(in_bytes(x.dtype)).itemsize


def join(xs: Sequence[jax.Array]) -> jax.Array:
    """One array with the rows of all, which are matrices: of bytes if there are several."""
    return xs[0] if len(xs) == 1 else jnp.concatenate([_as_bytes(x) for x in xs], 1)


def joined_type(xs: Sequence[Any]) -> tuple[int, Any]:
    """Width and element type of join(xs)."""
    return (xs[0].shape[1], xs[0].dtype) if len(xs) == 1 else (sum(map(row_bytes, xs)), jnp.dtype(jnp.uint8))


def separate(y: jax.Array, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The inverse of join, for rows that have travelled."""
    if len(xs) == 1:
        return [y]
    results, at = [], 0
    for x in xs:
        size = row_bytes(x)
        results.append(_from_bytes(y[:, at : at + size], x.dtype, x.shape[1]))
        at += size
    return results


def _as_bytes(x):
    """(rows, bytes), with the bits of x."""
    shape = len(x), row_bytes(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    return lax.bitcast_convert_type(x.astype(in_bytes(x.dtype)), jnp.uint8).reshape(shape)


def _from_bytes(y, dtype, width):
    if dtype == jnp.bool_:
        return y.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        halves = _from_bytes(y, jnp.finfo(dtype).dtype, 2 * width).reshape(len(y), width, 2)
        return lax.complex(halves[..., 0], halves[..., 1])
    sent = jnp.dtype(in_bytes(dtype))
    y = y.reshape(len(y), width, sent.itemsize)
    return lax.bitcast_convert_type(y if sent.itemsize > 1 else y[..., 0], sent).astype(dtype)
