"""Rows as floats of 8 bits with a scale per block, so that fewer bytes travel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check
from jaxcomm.moe.dispatch_combine import dispatch
from jaxcomm.moe.routing import Routing

VALUES = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("float32", "float8_e8m0fnu")
SMALLEST = np.finfo(np.float32).tiny  # CPUs and GPUs may treat smaller numbers as zero


def quantize(
    x: Any, *, dtype: Any = "float8_e4m3fn", block: int = 128, scale: Any = "float32"
) -> tuple[jax.Array, jax.Array]:
    """Rounds floats to 8 bits, with one scale per block of the last dimension.

    The scale of a block is its largest finite magnitude, divided by the largest number of `dtype`, and at least
    2^-126. The scale of a block of zeros is 1. Scales of the type float8_e8m0fnu are rounded up to a power of two.
    Infinite elements become NaN if `dtype` has no infinity; they do not change the other elements of the block.

    The two results are leaves of one payload: ``dispatch(quantize(x), routing)`` sends the scales with their rows. No
    gradient passes; see dispatch_quantized().

    Args:
      x: (..., d) floats of 16 or 32 bits.
      dtype: float8_e4m3fn, or float8_e5m2.
      block: elements per scale. The last block may be shorter.
      scale: type of the scales, float32 or float8_e8m0fnu (OCP MX formats).

    Returns:
      values (..., d) of `dtype`, and scales (..., ceil(d / block)).

    Raises:
      ValueError: invalid types or sizes (when tracing).
      TypeError: x has no floats of 16 or 32 bits, or a gradient is asked for (when tracing).
    """
    op = "moe.quantize"
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise TypeError(f"{op}: x must have floats of 16 or 32 bits, got element type {x.dtype}")
    if not x.ndim:
        raise ValueError(f"{op}: x must have at least one dimension, got ()")
    return _quantize(
        x, _one_of(op, "dtype", dtype, VALUES), _check.positive(op, "block", block), _one_of(op, "scale", scale, SCALES)
    )


def dequantize(values: Any, scales: Any, dtype: Any, *, block: int = 128) -> jax.Array:
    """Multiplies the results of quantize() in float32.

    Args:
      values: (..., d), floats of 8 bits.
      scales: (..., ceil(d / block)).
      dtype: type of the result.
      block: as in quantize().

    Returns:
      (..., d) of `dtype`.

    Raises:
      ValueError: the shapes do not fit (when tracing).
    """
    op = "moe.dequantize"
    values, scales = jnp.asarray(values), jnp.asarray(scales)
    block = _check.positive(op, "block", block)
    want = (*values.shape[:-1], -(-values.shape[-1] // block)) if values.ndim else None
    if scales.shape != want:
        raise ValueError(
            f"{op}: values of shape {values.shape} in blocks of {block} need scales of shape {want}, got {scales.shape}"
        )
    return (values.astype(jnp.float32) * _spread(scales.astype(jnp.float32), values, block)).astype(dtype)


def dispatch_quantized(
    x: Any,
    routing: Routing,
    *,
    dtype: Any = "float8_e4m3fn",
    block: int = 128,
    scale: Any = "float32",
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> jax.Array:
    """dispatch() of (T, d) floats whose rows travel as results of quantize().

    Derivatives are those of dispatch() (a straight-through estimator): tangents and gradients travel in the type of x.

    Args:
      x: (T, d) floats of 16 or 32 bits.
      routing, algorithm, max_sms: as in dispatch().
      dtype, block, scale: as in quantize().

    Returns:
      (C, d) in the type of x.

    Raises:
      ValueError, TypeError, jax.errors.JaxRuntimeError: as quantize() and dispatch().

    Cost: d bytes and the scales of one row per choice whose expert is on another rank.
    """
    return _dispatch(jnp.asarray(x), routing, dtype, block, scale, algorithm, max_sms)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5, 6))
def _dispatch(x, routing, dtype, block, scale, algorithm, max_sms):
    payload = quantize(x, dtype=dtype, block=block, scale=scale)
    values, scales = dispatch(payload, routing, algorithm=algorithm, max_sms=max_sms)
    return dequantize(values, scales, x.dtype, block=block)


@_dispatch.defjvp
def _dispatch_jvp(dtype, block, scale, algorithm, max_sms, primals, tangents):
    x, routing = primals
    rows = _dispatch(x, routing, dtype, block, scale, algorithm, max_sms)
    return rows, dispatch(tangents[0], routing, algorithm=algorithm, max_sms=max_sms)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _quantize(x, dtype, block, scale):
    scales = _scales(x, np.float32(jnp.finfo(dtype).max), block, scale)
    values = x.astype(jnp.float32) / _spread(scales.astype(jnp.float32), x, block)
    return values.astype(dtype), scales


@_quantize.defjvp
def _refuse_derivative(dtype, block, scale, primals, tangents):
    raise TypeError(
        f"moe.quantize: a derivative of {dtype} would be rounded to that type; use jaxcomm.moe.dispatch_quantized, "
        "whose gradient has the type of x, or apply jax.lax.stop_gradient to x"
    )


def _scales(x, largest, block, scale):
    """(..., d) -> (..., ceil(d / block))."""
    size = jnp.abs(x.astype(jnp.float32))
    size = jnp.where(jnp.isfinite(size), size, np.float32(0))
    size = jnp.pad(size, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    amax = size.reshape(*x.shape[:-1], -(-x.shape[-1] // block), block).max(-1, initial=0)
    # XLA turns the division by a constant into this product, but not always.
    scales = jnp.where(amax == 0, np.float32(1), jnp.maximum(amax * (1 / largest), SMALLEST))
    if scale == "float32":
        return scales
    # A float8_e8m0fnu is the exponent of a float32. Any fraction carries into it.
    exponents = (lax.bitcast_convert_type(scales, jnp.int32) + 0x7FFFFF) >> 23
    return lax.bitcast_convert_type(exponents.astype(jnp.uint8), jnp.dtype(scale))


def _spread(scales, x, block):
    """The scale of each element of x."""
    return jnp.repeat(scales, block, -1)[..., : x.shape[-1]]


def _one_of(op, name, dtype, allowed):
    try:
        found = jnp.dtype(dtype).name
    except TypeError:
        found = str(dtype)
    if found not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(allowed)}, got {found}")
    return found
