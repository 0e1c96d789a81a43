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
from jaxcomm.matmul.loops import Spec, sum_in_rank_order, wide

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


def _gather_types(x: Any, ys: Sequence[Any], num_weights: int, dtypes: Sequence[Any]) -> Any:
    """As _types. Sums over rows are accumulated in the call, in f32 for 16-bit floats."""
    return _types([x, *ys], [*dtypes[:num_weights], *map(wide, dtypes[num_weights:])])


def fits_gather(spec: Spec, x: Any, ys: Sequence[Any], num_weights: int, dtypes: Sequence[Any]) -> bool:
    """Whether loops.gather of these arguments is one call. Other gathers run as "direct"."""
    types = _gather_types(x, ys, num_weights, dtypes)
    return spec.num_batch == 0 and types is not None and types[0] == x.dtype  # as in "direct", x is sent in its type


def fits_scatter(spec: Spec, terms: Sequence[tuple[Any, Any]], dtype: Any) -> bool:
    """Whether loops.scatter of these arguments is one call. Other scatters run as "direct"."""
    types = _types([array for term in terms for array in term], [dtype])
    if types is None or types[1] != (dtype,):  # as in "direct", the parts are sent in the type of the result
        return False
    return spec.num_batch == 0


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
    types = _gather_types(x, ys, num_weights, dtypes)
    assert types is not None
    common, results = types
    matrices = [*ys[:num_weights], *(_rows_first(y, spec.axis) for y in ys[num_weights:])]
    outs = fused_p.bind(
        _rows_first(x, spec.axis),
        *(y.astype(common) for y in matrices),
        spec=spec,
        num_weights=num_weights,
        scatters=False,
        keeps=keep,
        results=results,
    )
    *products, gathered, _ = outs
    shape = list(x.shape[:-1])
    shape[spec.axis] *= spec.group_size
    products[:num_weights] = [_rows_back(y, shape, spec.axis) for y in products[:num_weights]]
    products = [y.astype(dtype) for y, dtype in zip(products, dtypes, strict=True)]
    return [*products, _rows_back(gathered, shape, spec.axis)] if keep else products


def scatter(xs: Sequence[Any], ws: Sequence[Any], *, spec: Spec, dtype: Any) -> Any:
    """As loops.scatter. The sum of several products is one product of the columns of all."""
    types = _types([*xs, *ws], [dtype])
    assert types is not None
    common, results = types
    rows = lax.concatenate([_rows_first(x, spec.axis).astype(common) for x in xs], 1)
    w = lax.concatenate([w.astype(common) for w in ws], 0)
    _, parts, _ = fused_p.bind(rows, w, spec=spec, num_weights=1, scatters=True, keeps=False, results=results)
    n = spec.group_size
    total = sum_in_rank_order(list(parts.reshape(n, rows.shape[0] // n, w.shape[-1])), dtype)
    shape = list(xs[0].shape[:-1])
    shape[spec.axis] //= n
    return _rows_back(total, shape, spec.axis)


# Operands: rows, *weights, *arrays with the rows of all ranks, as matrices of one element type. Results: the products
# (of `scatters`: the parts that this rank computes); the rows or parts that it receives, in rank order; memory for
# cuBLASLt.


def _shapes(x, *ys, spec, num_weights, scatters, keeps, results):
    n = 1 if scatters else spec.group_size
    gathered = x.update(shape=(n * x.shape[0], x.shape[1]))
    products = []
    for i, (y, dtype) in enumerate(zip(ys, results, strict=True)):
        contract: tuple = ((1 if i < num_weights else 0,), (0,))
        products.append(_compat.dot_general_type(gathered, y, contract, (), dtype))
    received = products[0] if scatters else gathered
    return [*products, received, x.update(shape=(1, _WORKSPACE_BYTES), dtype=np.dtype(np.uint8))]


def _lower(ctx, *operands, platform, spec, num_weights, scatters, keeps, results):
    def attributes(x, n):
        return {
            "chunks": np.int64(spec.chunks),
            "keeps": np.int64(keeps),
            "scatters": np.int64(scatters),
            "tf32": np.int64(bool(_tf32(spec.precision))),
            "weights": np.int64(num_weights),
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
