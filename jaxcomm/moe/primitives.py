"""The primitives of dispatch and combine, on rows of one dimension, and their derivatives.

With S, the 0/1 matrix (C, T K) of the slots of all ranks, and R, the sum over the choices of a token, dispatch is
S R^T, or S for payloads per choice. combine is R diag(weights) S^T, or S^T.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _compat
from jaxcomm._compat import ad
from jaxcomm._dtypes import accumulator_type
from jaxcomm._primitive import register
from jaxcomm.moe.lowering import lower_combine, lower_dispatch, split
from jaxcomm.moe.row_assignment import Assignment


def dispatch(xs: list[jax.Array], assignment: Assignment, call: Any, per_choice: bool) -> list[jax.Array]:
    """[(T or T K, W), ...] -> [(C, W), ...]."""
    return dispatch_p.bind(*_compat.equally_varying(*xs, *assignment), call=call, per_choice=per_choice)


def combine(
    rows: jax.Array, weights: jax.Array | None, assignment: Assignment, call: Any, per_choice: bool
) -> jax.Array:
    """(C, W), weights (T, K) -> (T, W), or (T K, W) per choice."""
    factors = [] if weights is None else [weights]
    return combine_p.bind(*_compat.equally_varying(rows, *factors, *assignment), call=call, per_choice=per_choice)


def _dispatch_types(*operands, call, per_choice):
    xs, _ = split(operands)
    return [x.update(shape=(call.capacity, *x.shape[1:]), weak_type=False) for x in xs]


def _combine_type(*operands, call, per_choice):
    (rows, *_), assignment = split(operands)
    slot = assignment.slot
    return rows.update(shape=(slot.size if per_choice else slot.shape[0], *rows.shape[1:]), weak_type=False)


def dispatch_tangents(
    tangents: list[Any], results: list[Any], assignment: Assignment, call: Any, per_choice: bool
) -> list[Any]:
    """The tangents of the results of dispatch. Those that are not zero travel in one call."""
    moving = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(dispatch(moving, assignment, call, per_choice) if moving else [])
    return [
        _compat.zero_tangent(y) if type(t) is ad.Zero else next(moved) for t, y in zip(tangents, results, strict=True)
    ]


def _dispatch_jvp(primals, tangents, *, call, per_choice):
    results = dispatch_p.bind(*primals, call=call, per_choice=per_choice)
    return results, dispatch_tangents(split(tangents)[0], results, split(primals)[1], call, per_choice)


def _dispatch_transpose(cotangents, *operands, call, per_choice):
    xs, assignment = split(operands)
    results: list[Any] = []
    for ct, x in zip(cotangents, xs, strict=True):
        if not ad.is_undefined_primal(x):
            results.append(None)
        elif type(ct) is ad.Zero:
            results.append(ad.Zero(x.aval))
        else:
            _check_gradient(x.aval.dtype, call)
            results.append(combine(ct, None, assignment, call, per_choice))
    return [*results, None, None, None]


def _check_gradient(dtype, call):
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"moe.dispatch at {call.site}: a gradient of {jnp.dtype(dtype)} would be rounded to that type; use "
            "jaxcomm.moe.dispatch_quantized, or apply jax.lax.stop_gradient to x"
        )


def _combine_jvp(primals, tangents, *, call, per_choice):
    (rows, *weights), assignment = split(primals)
    (drows, *dweights), _ = split(tangents)
    result = combine_p.bind(*primals, call=call, per_choice=per_choice)
    terms = []
    if type(drows) is not ad.Zero:
        terms.append(combine(drows, weights[0] if weights else None, assignment, call, per_choice))
    if dweights and type(dweights[0]) is not ad.Zero:
        terms.append(combine(rows, dweights[0], assignment, call, per_choice))
    return result, functools.reduce(ad.add_tangents, terms) if terms else _compat.zero_tangent(result)


def _combine_transpose(ct, *operands, call, per_choice):
    (rows, *weights), assignment = split(operands)
    undefined = ad.is_undefined_primal
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if undefined(x) else None for x in operands]
    results: list[Any] = [None] * len(operands)
    (sent,) = dispatch([ct], assignment, call, per_choice)
    dtype = accumulator_type(sent.dtype)
    if undefined(rows):
        results[0] = sent
        if weights:
            (factors,) = dispatch([weights[0].reshape(-1, 1)], assignment, call, True)
            results[0] = (sent.astype(dtype) * factors.astype(dtype)).astype(sent.dtype)
    elif undefined(weights[0]):
        products = jnp.sum(sent.astype(dtype) * rows.astype(dtype), 1, keepdims=True)
        grad = combine(products, None, assignment, call, True)
        grad = grad if jnp.issubdtype(weights[0].aval.dtype, jnp.complexfloating) else grad.real
        results[1] = grad.reshape(weights[0].aval.shape).astype(weights[0].aval.dtype)
    return results


def check_batch(axis_data: Any, dims: Any, call: Any, what: str) -> None:
    """Raises if vmap has an axis of the mesh, or a batch dimension (`dims`) of what defines the routing."""
    if axis_data.name in call.axes:
        raise NotImplementedError(f"{call.op}: {axis_data.name!r} is an axis of vmap, expected axes of a mesh")
    if any(d is not None for d in dims):
        raise NotImplementedError(f"{call.op}: {what} a dimension of vmap; route and call it without vmap")


def merge_batch(x: jax.Array, dimension: int | None, size: int) -> jax.Array:
    """The batch as a part of the rows."""
    if dimension is None:
        x = jnp.broadcast_to(x[:, None], (x.shape[0], size, x.shape[1]))
    else:
        x = jnp.moveaxis(x, dimension, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def split_batch(y: jax.Array, size: int) -> jax.Array:
    return y.reshape(y.shape[0], size, y.shape[1] // size)


def _dispatch_batch(axis_data, operands, dims, *, call, per_choice):
    (xs, assignment), (dims, fixed) = split(operands), split(dims)
    check_batch(axis_data, fixed, call, "the routing has")
    if all(d is None for d in dims):
        return dispatch_p.bind(*operands, call=call, per_choice=per_choice), [None] * len(xs)
    merged = [merge_batch(x, d, axis_data.size) for x, d in zip(xs, dims, strict=True)]
    results = [
        split_batch(y, axis_data.size) for y in dispatch_p.bind(*merged, *assignment, call=call, per_choice=per_choice)
    ]
    return results, [1] * len(results)


def _combine_batch(axis_data, operands, dims, *, call, per_choice):
    ((rows, *weights), assignment), (dims, fixed) = split(operands), split(dims)
    check_batch(axis_data, fixed, call, "the routing has")
    if all(d is None for d in dims):
        return combine_p.bind(*operands, call=call, per_choice=per_choice), None
    merged = merge_batch(rows, dims[0], axis_data.size)
    if not weights or dims[1] is None:
        return split_batch(
            combine_p.bind(merged, *weights, *assignment, call=call, per_choice=per_choice), axis_data.size
        ), 1
    # The row of each choice returns, because each element of the batch has weights of its own.
    choices = split_batch(combine_p.bind(merged, *assignment, call=call, per_choice=True), axis_data.size)
    factors = jnp.moveaxis(weights[0], dims[1], 2)  # (T, K, batch)
    dtype = accumulator_type(rows.dtype)
    choices = choices.reshape(*factors.shape, choices.shape[2]).astype(dtype) * factors[..., None].astype(dtype)
    zeros = jnp.zeros_like(choices, shape=(choices.shape[0], *choices.shape[2:]))
    total = functools.reduce(jnp.add, [choices[:, k] for k in range(factors.shape[1])], zeros)
    return total.astype(rows.dtype), 1


dispatch_p = register(
    "moe_dispatch",
    shape=_dispatch_types,
    lower=lower_dispatch,
    jvp=_dispatch_jvp,
    transpose=_dispatch_transpose,
    batch=_dispatch_batch,
    multiple_results=True,
)
combine_p = register(
    "moe_combine",
    shape=_combine_type,
    lower=lower_combine,
    jvp=_combine_jvp,
    transpose=_combine_transpose,
    batch=_combine_batch,
)
