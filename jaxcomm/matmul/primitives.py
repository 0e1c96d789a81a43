"""The two primitives of collective matmul and their rules.

`gather_p` multiplies the rows of all ranks, `scatter_p` sums products over ranks and scatters the rows. Both are linear
in x, and in the other operands. The transposes of each are calls of the other or of itself, so derivatives of every
order exchange blocks in the same way:

| primitive | transpose for x | transpose for the other operands |
|---|---|---|
| gather_p | one scatter_p with a term per product | one gather_p of x |
| scatter_p | one gather_p of the cotangent, for all operands together | |
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _compat, _lowering
from jaxcomm._compat import ad
from jaxcomm._core import plan
from jaxcomm._primitive import register, shift
from jaxcomm.matmul import loops
from jaxcomm.matmul.loops import Spec
from jaxcomm.ops.all_gather import all_gather_p
from jaxcomm.ops.psum_scatter import reduce_scatter_p


def _transposed(w: Any) -> Any:
    """A weight with rows and columns exchanged."""
    return jnp.swapaxes(w, -1, -2)


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _unsharded(spec: Spec, avals: Sequence[Any]) -> None:
    for aval in avals:
        if any(names is not None for names in aval.sharding.spec):
            raise ValueError(
                f"{spec.call.op}: an operand of shape {aval.shape} is sharded over explicit mesh axes "
                f"({aval.sharding.spec}); reshard it first (jax.sharding.reshard)"
            )


def _product_aval(f: Callable[..., Any], a: Any, b: Any, spec: Spec, dtype: Any) -> Any:
    """Type of a product of loops.py."""
    contract: tuple = ((a.ndim - 1,), (spec.num_batch,))
    if f is loops.columns_product:
        contract = (tuple(range(spec.num_batch, a.ndim - 1)),) * 2
    return _compat.dot_general_type(a, b, contract, tuple(range(spec.num_batch)), dtype)


# gather_p: operands x, *ys; see loops.gather.


def _gather_types(x, *ys, spec, num_weights, dtypes):
    _unsharded(spec, (x, *ys))
    gathered, _ = all_gather_p.abstract_eval(x, call=spec.transfer, axis=spec.axis)
    of = [loops.rows_product] * num_weights + [loops.columns_product] * (len(ys) - num_weights)
    return [_product_aval(f, gathered, y, spec, dtype) for f, y, dtype in zip(of, ys, dtypes, strict=True)]


def _gather_jvp(primals, tangents, *, spec, num_weights, dtypes):
    (x, *ys), (dx, *dys) = primals, tangents
    moving = [i for i, dy in enumerate(dys) if not _is_zero(dy)]
    params = {"spec": spec, "num_weights": num_weights, "dtypes": dtypes}
    outs = gather_p.bind(x, *ys, **params)
    changes = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if not _is_zero(dx):
        changes = gather_p.bind(dx, *ys, **params)
    if moving:
        weights = sum(i < num_weights for i in moving)
        params |= {"num_weights": weights, "dtypes": tuple(dtypes[i] for i in moving)}
        parts = gather_p.bind(x, *[dys[i] for i in moving], **params)
        for i, part in zip(moving, parts, strict=True):
            changes[i] = ad.add_tangents(changes[i], part)
    return outs, changes


def _gather_transpose(products, x, *ys, spec, num_weights, dtypes):
    found = [i for i, ct in enumerate(products) if not _is_zero(ct)]
    if ad.is_undefined_primal(x):
        terms = [
            (products[i], _transposed(ys[i])) if i < num_weights else (ys[i], _transposed(products[i])) for i in found
        ]
        total: Any = ad.Zero(x.aval)
        if terms:
            xs, ws = zip(*terms, strict=True)
            (total,) = scatter_p.bind(*xs, *ws, spec=spec, dtype=x.aval.dtype)
        return [total, *[None] * len(ys)]
    undefined = [i for i, y in enumerate(ys) if ad.is_undefined_primal(y)]
    results = [ad.Zero(y.aval) if ad.is_undefined_primal(y) else None for y in ys]
    # Products with weights and products with rows change places.
    order = sorted((i for i in undefined if i in found), key=lambda i: i < num_weights)
    if order:
        grads = gather_p.bind(
            x,
            *[products[i] for i in order],
            spec=spec,
            num_weights=sum(i >= num_weights for i in order),
            dtypes=tuple(ys[i].aval.dtype for i in order),
        )
        for i, grad in zip(order, grads, strict=True):
            results[i] = grad
    return [None, *results]


def _fold_columns(y: Any, dimension: int | None) -> Any:
    """Makes a batch dimension part of the columns."""
    if dimension is None:
        return y
    y = jnp.moveaxis(y, dimension, -1)
    return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])


def _to(x: Any, dimension: int | None, position: int, size: int) -> Any:
    """Moves a batch dimension, or adds one."""
    if dimension is not None:
        return jnp.moveaxis(x, dimension, position)
    return lax.broadcast_in_dim(
        x,
        (*x.shape[:position], size, *x.shape[position:]),
        tuple(shift(i, position) for i in range(x.ndim)),
    )


def _gather_batch(axis_data, args, dimensions, *, spec, num_weights, **params):
    params |= {"num_weights": num_weights}
    if axis_data.name in spec.call.axes:
        return _batch_named(_run_gather, axis_data, args, dimensions, spec=spec, **params)
    (x, *ys), (dx, *dys), size = args, dimensions, axis_data.size
    if dx is None:  # x is sent once: the batch dimension becomes columns
        outs = gather_p.bind(x, *map(_fold_columns, ys, dys), spec=spec, **params)
        batched = [d is not None for d in dys]
        outs = [
            out.reshape(*out.shape[:-1], out.shape[-1] // size, size) if b else out
            for out, b in zip(outs, batched, strict=True)
        ]
        return outs, [out.ndim - 1 if b else None for out, b in zip(outs, batched, strict=True)]
    if num_weights == len(ys) and all(d is None for d in dys):  # one product for the whole batch
        at = spec.num_batch
        outs = gather_p.bind(_to(x, dx, at, size), *ys, spec=spec.with_row_dimension(), **params)
        return outs, [at] * len(outs)
    ys = [_to(y, d, 0, size) for y, d in zip(ys, dys, strict=True)]
    outs = gather_p.bind(_to(x, dx, 0, size), *ys, spec=spec.with_batch_dimension(), **params)
    return outs, [0] * len(outs)


def _batch_named(run, axis_data, args, dimensions, *, spec, **params):
    """vmap over an axis of the group. The collectives inside have rules for it."""
    run = functools.partial(run, spec=spec.with_algorithm("unfused"), **params)
    args = [_to(x, d, 0, axis_data.size) for x, d in zip(args, dimensions, strict=True)]
    outs = jax.vmap(run, axis_name=axis_data.name, axis_size=axis_data.size)(*args)
    return outs, [0] * len(outs)


# scatter_p: operands *xs, *ws, one of each per term; see loops.scatter. It has a list of one result.


def _scatter_types(*operands, spec, dtype):
    _unsharded(spec, operands)
    x, w = operands[0], operands[len(operands) // 2]
    product = _product_aval(loops.rows_product, x, w, spec, dtype)
    return [reduce_scatter_p.abstract_eval(product, call=spec.transfer, axis=spec.axis)[0]]


def _terms(operands: Sequence[Any]) -> list[tuple[Any, Any]]:
    half = len(operands) // 2
    return list(zip(operands[:half], operands[half:], strict=True))


def _scatter_jvp(primals, tangents, *, spec, dtype):
    out = scatter_p.bind(*primals, spec=spec, dtype=dtype)
    terms = []
    for (x, w), (dx, dw) in zip(_terms(primals), _terms(tangents), strict=True):
        terms += [] if _is_zero(dx) else [(dx, w)]
        terms += [] if _is_zero(dw) else [(x, dw)]
    if not terms:
        return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
    xs, ws = zip(*terms, strict=True)
    return out, scatter_p.bind(*xs, *ws, spec=spec, dtype=dtype)


def _scatter_transpose(cotangents, *operands, spec, dtype):
    (ct,) = cotangents
    half = len(operands) // 2
    results = [ad.Zero(y.aval) if ad.is_undefined_primal(y) else None for y in operands]
    if _is_zero(ct):
        return results
    of_x = [i for i in range(half) if ad.is_undefined_primal(operands[i])]
    of_w = [i for i in range(half) if ad.is_undefined_primal(operands[half + i])]
    targets = [*of_x, *(half + i for i in of_w)]
    grads = gather_p.bind(
        ct,
        *[_transposed(operands[half + i]) for i in of_x],
        *[operands[i] for i in of_w],
        spec=spec,
        num_weights=len(of_x),
        dtypes=tuple(operands[i].aval.dtype for i in targets),
    )
    for i, grad in zip(targets, grads, strict=True):
        results[i] = grad if i < half else _transposed(grad)
    return results


def _scatter_batch(axis_data, args, dimensions, *, spec, dtype):
    if axis_data.name in spec.call.axes:
        return _batch_named(_run_scatter, axis_data, args, dimensions, spec=spec, dtype=dtype)
    if all(d is None for d in dimensions):
        return scatter_p.bind(*args, spec=spec, dtype=dtype), [None]
    half, size = len(args) // 2, axis_data.size
    if all(d is None for d in dimensions[half:]):  # one product for the whole batch
        at = spec.num_batch
        xs = [_to(x, d, at, size) for x, d in zip(args[:half], dimensions[:half], strict=True)]
        return scatter_p.bind(*xs, *args[half:], spec=spec.with_row_dimension(), dtype=dtype), [at]
    args = [_to(x, d, 0, size) for x, d in zip(args, dimensions, strict=True)]
    return scatter_p.bind(*args, spec=spec.with_batch_dimension(), dtype=dtype), [0]


def _run_gather(x, *ys, spec, **params):
    return loops.gather(x, ys, spec=spec, **params)


def _run_scatter(*operands, spec, **params):
    xs, ws = zip(*_terms(operands), strict=True)
    return [loops.scatter(xs, ws, spec=spec, **params)]


def _lower(ctx, *operands, platform, run, product, spec, **params):
    if spec.call.algorithm is None and _compat.in_spmd_region(ctx.module_context.axis_context):
        site, rows = _lowering.Site(ctx, spec.call, platform), ctx.avals_in[0]
        placement = plan.Placement() if site.why_xla else site.placement
        able, size = _lowering.capabilities(platform, None), rows.size * rows.dtype.itemsize
        algorithm = plan.resolve_collective_matmul(product(operands, params), size, placement, able)
        spec = spec.with_algorithm(algorithm)
    run = functools.partial(run, spec=spec, **params)
    return _compat.mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _product_of_gather(operands, params):
    return "rows" if params["num_weights"] == len(operands) - 1 else "sums"


gather_p = register(
    "all_gather_matmul",
    shape=_gather_types,
    lower=functools.partial(_lower, run=_run_gather, product=_product_of_gather),
    jvp=_gather_jvp,
    transpose=_gather_transpose,
    batch=_gather_batch,
    multiple_results=True,
)
scatter_p = register(
    "matmul_psum_scatter",
    shape=_scatter_types,
    lower=functools.partial(_lower, run=_run_scatter, product=lambda *_: "scatter"),
    jvp=_scatter_jvp,
    transpose=_scatter_transpose,
    batch=_scatter_batch,
    multiple_results=True,
)
