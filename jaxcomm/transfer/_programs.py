"""insert() and emit(): cache pages in and out of programs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _check, _native
from jaxcomm.transfer._pages import _ORDER, PageLayout


def insert(
    cache: jax.Array,
    handle: Any,
    pages: Any,
    layer: Any,
    *,
    layout: PageLayout,
    timeout_s: float = 60.0,
    on_error: str = "raise",
) -> Any:
    """Writes a layer that a pull has read into pages of a cache, under jit. Waits until the layer has arrived.

    Donate the cache to the program, and XLA updates it in place. The wait blocks no thread of XLA's. CPUs only.

    Args:
      cache: the cache of one layer, of shape layout.shape(pages of the cache).
      handle: Pull.handle; may be traced.
      pages: numbers of the pages of the cache, as many as the pull has; may be traced.
      layer: number of the layer; may be traced.
      layout: that of the pull's pool.
      timeout_s: limit of the wait.
      on_error: "raise", or "mask": if the pull has ended or fails, or the layer does not arrive in time, the program
        goes on with the cache as it was.

    Returns:
      The cache with the new pages. With "mask", also an int32 array, with 1 for each of `pages` that did not arrive and
      is to be computed again.

    Raises, when the result is used:
      jax.errors.JaxRuntimeError: the pull has ended or failed, or the layer did not arrive in time. With "mask": a page
        or the layer is out of range, or the pages of the pull and of the cache differ in number or shape.
    """
    if on_error not in ("raise", "mask"):
        raise ValueError(f"insert: on_error must be 'raise' or 'mask', got {on_error!r}")
    masks = on_error == "mask"
    timeout_s = _check.number("insert", "timeout_s", timeout_s, 0, math.inf)
    attributes = {"timeout_s": np.float64(timeout_s), "masks_errors": masks}
    mask = jax.ShapeDtypeStruct(jnp.shape(pages), jnp.int32)
    result = _call("jaxcomm_cache_insert", cache, handle, pages, layer, layout, mask, **attributes)
    return tuple(result) if masks else result[0]


def emit(cache: jax.Array, handle: Any, pages: Any, layer: Any, *, layout: PageLayout) -> Any:
    """Copies pages of a cache into those of an offer, under jit, and gives the layer to the reader.

    Use the result instead of the cache from then on: so the copy comes before later writes to the cache. Does nothing
    if the offer is over. CPUs only.

    Args:
      cache: the cache of one layer, of shape layout.shape(pages of the cache).
      handle: Offer.handle of an offer with streamed=True; may be traced.
      pages: numbers of the pages of the cache, as many as the offer has; may be traced.
      layer: number of the layer; may be traced.
      layout: that of the offer's pool.

    Returns:
      The cache, unchanged.
    """
    return _call("jaxcomm_cache_emit", cache, handle, pages, layer, layout)[0]


def _call(
    target: str,
    cache: jax.Array,
    handle: Any,
    pages: Any,
    layer: Any,
    layout: PageLayout,
    *more_results: jax.ShapeDtypeStruct,
    **more: Any,
) -> Any:
    _native.register()
    axis = layout.order.index("page")
    if cache.ndim != len(_ORDER) or cache.shape != layout.shape(cache.shape[axis]) or cache.dtype != layout.dtype:
        raise ValueError(
            f"{target.removeprefix('jaxcomm_cache_')}: cache must have shape {layout.shape(-1)}, with any number of "
            f"pages for -1, and dtype {np.dtype(layout.dtype)}, got {cache.shape} and {cache.dtype}"
        )
    numbers = jnp.stack([jnp.asarray(handle, jnp.int32), jnp.asarray(layer, jnp.int32)])
    results = [jax.ShapeDtypeStruct(cache.shape, cache.dtype), *more_results]
    call = jax.ffi.ffi_call(target, results, input_output_aliases={0: 0}, has_side_effect=True)
    order = np.array([layout.order.index(name) for name in _ORDER], np.int64)
    return call(cache, numbers, jnp.asarray(pages, jnp.int32), order=order, **more)
