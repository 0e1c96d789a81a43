"""Algorithm "fused": one custom call multiplies and transfers, for GPUs (ffi/cuda/runtime/fused_matmul.h).

The call multiplies matrices of 2 dimensions by cuBLASLt. The rows that ranks exchange come first.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _compat, _lowering
from jaxcomm._primitive import register
from jaxcomm.matmul.loops import Spec, sum_in_rank_order

NAME = "fused"
PLATFORMS = frozenset({"cuda"})
# Element types of operands that cuBLASLt multiplies, and the types of their products.
_RESULTS = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "float64": ("float64",),
}
# cuBLAS itself allocates 32 MiB on a GPU of compute capability 9.0 or later. The rest is for alignment (product.h).
_WORKSPACE_BYTES = (32 << 20) + 256


def check(op: str, dtype: Any, results: Sequence[Any], precision: Any) -> None:
    """Raises ValueError unless cuBLASLt computes such products."""
    for result in results:
        if str(result) not in _RESULTS.get(str(dtype), ()):
            raise ValueError(
                f"{op}: algorithm 'fused' multiplies float16, bfloat16, float32 and float64, with results of the same "
                f"type or of float32 for 16 bits; got {dtype} with result {result}. Pass 'direct' or 'ring'"
            )
    if _tf32(precision) is None:
        raise ValueError(
            f"{op}: algorithm 'fused' takes a jax.lax.Precision or its name as precision, got {precision!r}. Pass "
            "'direct' or 'ring'"
        )


def _tf32(precision: Any) -> bool | None:
    """Whether XLA:GPU may round f32 operands to TF32: up to Precision.HIGH. None: not a jax.lax.Precision."""
    both = precision if isinstance(precision, tuple) else (precision,)
    try:
        return all(p is None or lax.Precision(p) != lax.Precision.HIGHEST for p in both)
    except ValueError:
        return None


def _types(operands: Sequence[Any], dtypes: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Element types of the operands and of the products; None if cuBLASLt does not compute products of these types."""
    common = operands[0].dtype
    with jax.numpy_dtype_promotion("standard"):
        for operand in operands[1:]:
            common = jnp.promote_types(common, operand.dtype)
    allowed = _RESULTS.get(str(common), ())
    # A product of another type is converted from its operands' type: the transpose of a product with a wider result.
    results = tuple(dtype if str(dtype) in allowed else common for dtype in dtypes)
    if not allowed or any(r != d and d.itemsize > r.itemsize for r, d in zip(results, dtypes, strict=True)):
        return None
    return common, results


def fits_gather(spec: Spec, x: Any, ys: Sequence[Any], num_weights: int, dtypes: Sequence[Any]) -> bool:
    """Whether loops.gather of these arguments is one call. Other gathers run as "direct"."""
    return spec.num_batch == 0 and num_weights == len(ys) and _types([x, *ys], dtypes) is not None


def fits_scatter(spec: Spec, terms: Sequence[tuple[Any, Any]], dtype: Any) -> bool:
    """Whether loops.scatter of these arguments is one call. Other scatters run as "direct"."""
    types = _types(terms[0], [dtype])
    if types is None or types[1] != (dtype,):  # as in "direct", the parts are sent in the type of the result
        return False
    return spec.num_batch == 0 and len(terms) == 1


def _rows_first(x: Any, axis: int) -> Any:
    """As a matrix, ordered by the rows along `axis`."""
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rows_back(y: Any, shape: Sequence[int], axis: int) -> Any:
    """The inverse. `shape`: of the result without its number of columns."""
    moved = [shape[axis], *(size for i, size in enumerate(shape) if i != axis)]
    return jnp.moveaxis(y.reshape(*moved, y.shape[-1]), 0, axis)


def gather(x: Any, ys: Sequence[Any], *, spec: Spec, num_weights: int, dtypes: Sequence[Any], keep: bool) -> list:
    """As loops.gather."""
    del num_weights
    types = _types([x, *ys], dtypes)
    assert types is not None
    common, results = types
    rows = _rows_first(x, spec.axis).astype(common)
    outs = fused_p.bind(rows, *(y.astype(common) for y in ys), spec=spec, scatters=False, keeps=keep, results=results)
    *products, gathered, _ = outs
    shape = list(x.shape[:-1])
    shape[spec.axis] *= spec.group_size
    products = [_rows_back(y, shape, spec.axis).astype(dtype) for y, dtype in zip(products, dtypes, strict=True)]
    return [*products, _rows_back(gathered, shape, spec.axis).astype(x.dtype)] if keep else products


def scatter(xs: Sequence[Any], ws: Sequence[Any], *, spec: Spec, dtype: Any) -> Any:
    """As loops.scatter."""
    (x,), (w,) = xs, ws
    types = _types([x, w], [dtype])
    assert types is not None
    common, results = types
    rows = _rows_first(x, spec.axis).astype(common)
    _, parts, _ = fused_p.bind(rows, w.astype(common), spec=spec, scatters=True, keeps=False, results=results)
    n = spec.group_size
    total = sum_in_rank_order(list(parts.reshape(n, rows.shape[0] // n, w.shape[-1])), dtype)
    shape = list(x.shape[:-1])
    shape[spec.axis] //= n
    return _rows_back(total, shape, spec.axis)


# Operands: rows, *weights, as matrices of one element type. Results: the products (of `scatters`: the parts that this
# rank computes); the rows or parts that it receives, in rank order; memory for cuBLASLt.


def _shapes(x, *ws, spec, scatters, keeps, results):
    contract: tuple = ((1,), (0,))
    n = 1 if scatters else spec.group_size
    products = []
    for w, dtype in zip(ws, results, strict=True):
        product = _compat.dot_general_type(x, w, contract, (), dtype)
        products.append(product.update(shape=(n * x.shape[0], w.shape[1])))
    received = products[0] if scatters else x.update(shape=(n * x.shape[0], x.shape[1]))
    return [*products, received, x.update(shape=(1, _WORKSPACE_BYTES), dtype=np.dtype(np.uint8))]


def _lower(ctx, *operands, platform, spec, scatters, keeps, results):
    def attributes(x, n):
        return {
            "chunks": np.int64(spec.chunks),
            "keeps": np.int64(keeps),
            "scatters": np.int64(scatters),
            "tf32": np.int64(bool(_tf32(spec.precision))),
        }

    def xla(*xs):  # primitives.py has chosen another algorithm
        raise AssertionError("a fused call is never one of XLA's collectives")

    return _lowering.lower(
        ctx,
        *operands,
        platform=platform,
        call=spec.call,
        target="jaxcomm_fused_matmul",
        attributes=attributes,
        alone=None,
        xla=xla,
        own_stream=True,
    )


fused_p = register("fused_matmul", shape=_shapes, lower=_lower, multiple_results=True)
