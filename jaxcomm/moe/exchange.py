"""The primitives of dispatch and combine, on rows of one dimension, and their derivatives.

With S, the 0/1 matrix (C, T K) of the slots of all ranks, and R, the sum over the choices of a token, dispatch is
S R^T, or S for payloads per choice. combine is R diag(weights) S^T, or S^T.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _compat, _lowering
from jaxcomm._primitive import register
from jaxcomm.moe import places
from jaxcomm.moe.check import refuse_unchecked
from jaxcomm.moe.routing import Routing
from jaxcomm.ops.ragged_all_to_all import exchange, reverse


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static parameters of both primitives.

    Attributes:
      call: arguments of the op.
      capacity: C.
      per_choice: payloads have a row per choice, not per token.
      reduce: "node" or "home".
    """

    call: Any
    capacity: int
    per_choice: bool
    reduce: str


def layout_of(routing: Routing, call: Any, per_choice: bool) -> Layout:
    return Layout(call, routing.capacity, per_choice, routing.reduce)


def _as_bytes(x):
    """(rows, bytes), with the bits of x."""
    rows = x.shape[0]
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    x = x.astype(_lowering.in_bytes(x.dtype))
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(rows, -1)


def _from_bytes(y, dtype, width):
    if dtype == jnp.bool_:
        return y.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        halves = _from_bytes(y, jnp.finfo(dtype).dtype, 2 * width).reshape(len(y), width, 2)
        return lax.complex(halves[..., 0], halves[..., 1])
    whole = jnp.dtype(_lowering.in_bytes(dtype))
    y = y.reshape(len(y), width, whole.itemsize)
    return lax.bitcast_convert_type(y if whole.itemsize > 1 else y[..., 0], whole).astype(dtype)


def _dispatch_by_exchange(*args, layout):
    """Packs the rows by expert and sends them to the slots."""
    *xs, slot, expert, table, starts = args
    whole, order = _slices(layout, slot, expert, table, starts)
    joined = join(xs)
    packed = joined[order] if slot.shape[0] else jnp.zeros((0, joined.shape[1]), joined.dtype)
    zeros = jnp.zeros((layout.capacity, packed.shape[1]), packed.dtype)
    return parts(exchange(packed, zeros, whole, call=_of_slices(layout.call)), xs)


def _slices(layout, *where):
    return places.slices_and_order(*where, call=layout.call, per_choice=layout.per_choice)


def _of_slices(call):
    """The call as one of ragged_all_to_all, which has other algorithms."""
    return call if call.algorithm == "xla" else dataclasses.replace(call, algorithm=None)


def join(xs):
    """One array with the rows of all; bytes if there are several."""
    return xs[0] if len(xs) == 1 else jnp.concatenate([_as_bytes(x) for x in xs], 1)


def parts(y, xs):
    """The inverse of join, for rows that have travelled."""
    if len(xs) == 1:
        return [y]
    results, at = [], 0
    for x in xs:
        size = x.shape[1] * (1 if x.dtype == jnp.bool_ else jnp.dtype(_lowering.in_bytes(x.dtype)).itemsize)
        results.append(_from_bytes(y[:, at : at + size], x.dtype, x.shape[1]))
        at += size
    return results


def wide(dtype: Any) -> Any:
    """The type in which combine adds rows of this type."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(jnp.int32) if dtype == jnp.bool_ else jnp.dtype(dtype)


def _combine_by_exchange(rows, *args, layout, ranks_per_node):
    """Fetches the rows, packed by expert, and adds those of each token."""
    *weights, slot, expert, table, starts = args
    whole = places.slices(table, starts)
    n, total = table.shape
    zeros = jnp.zeros((slot.size, rows.shape[1]), rows.dtype)
    packed = exchange(rows, zeros, reverse(whole), call=_of_slices(layout.call))
    place = places.packed(slot, expert, places.own(whole, layout.call))
    if layout.per_choice:
        return packed.at[place].get(mode="fill", fill_value=0)
    nodes = n // ranks_per_node if layout.reduce == "node" else 1
    node = expert // (total // n) // (n // nodes)

    def fetch(k, g):
        at = jnp.where(node[:, k] == g, place[:, k], slot.size)
        return packed.at[at].get(mode="fill", fill_value=0)

    return _add(fetch, nodes, rows, weights, slot)


def _add(fetch, nodes, rows, weights, slot):
    """The sums of the rows of each token, node by node. fetch(k, g): its k-th row if it lies in node g, else zero."""
    adds = wide(rows.dtype)
    y = jnp.zeros((slot.shape[0], rows.shape[1]), adds)
    for g in range(nodes):
        part = jnp.zeros_like(y)
        for k in range(slot.shape[1]):
            row = fetch(k, g).astype(adds)
            part = part + (row * weights[0][:, k, None].astype(adds) if weights else row)
        y = y + (part.astype(rows.dtype).astype(adds) if nodes > 1 else part)
    return y.astype(rows.dtype)


def _combine_by_choices(rows, *args, layout, ranks_per_node):
    """Fetches the row of each choice by jaxcomm's own combine, and adds those of each token."""
    *weights, slot, expert, table, starts = args
    n, total = table.shape
    adds = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    operands = _compat.equally_varying(rows, slot, expert, jnp.zeros(0, adds), places.slices(table, starts))
    each = dataclasses.replace(layout, per_choice=True)
    choices = combine_rows_p.bind(*operands, layout=each, num_experts=total, weighted=False)
    choices = choices.reshape(*slot.shape, rows.shape[1])
    nodes = n // ranks_per_node if layout.reduce == "node" else 1
    node = expert // (total // n) // (n // nodes)
    return _add(
        lambda k, g: jnp.where((node[:, k] == g)[:, None], choices[:, k], jnp.zeros_like(choices[:, k])),
        nodes,
        rows,
        weights,
        slot,
    )


def _named(ctx, layout, platform):
    """The layout of a call between nodes has the name of its algorithm: NCCL may find nodes where Python sees none."""
    name = layout.call.algorithm
    if platform == "cuda" and name == "hierarchical" and ctx.avals_in[-2].shape[0] == 1:
        name = "direct"  # no plan has nodes there
    elif _uses_rails(ctx, layout, platform):
        name = "hierarchical"
    return dataclasses.replace(layout, call=dataclasses.replace(layout.call, algorithm=name))


def _lower_dispatch(ctx, *args, platform, layout):
    layout = _named(ctx, layout, platform)
    if ctx.avals_in[-4].shape[1] > 0 and _is_native(ctx, layout, platform):
        return _lower_native_dispatch(ctx, *args, platform=platform, layout=layout)
    run = functools.partial(_dispatch_by_exchange, layout=layout)
    return _compat.mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _is_native(ctx, layout, platform):
    """Whether rows move by jaxcomm's own dispatch and combine: on CPUs, and on GPUs of one node or with GIN."""
    if platform == "cpu":
        return not _lowering.uses_xla(layout.call, platform)
    # A program for several hosts runs on one, where "hierarchical" is "direct" (ffi/cuda/program/call_program.cc).
    in_node = _lowering.uses_row_kernel(ctx, layout.call, platform, names=("direct", "hierarchical"))
    if in_node or _uses_rails(ctx, layout, platform):
        return True
    if layout.call.raises and ctx.avals_in[-4].shape[1] > 0:
        if _lowering.uses_rails(ctx, layout.call, platform):
            tokens, choices = ctx.avals_in[-4].shape
            raise NotImplementedError(
                f"{layout.call.op} at {layout.call.site}: {tokens * choices} choices of a rank and "
                f"{ctx.avals_in[-2].shape[1]} experts do not fit into the shared memory of jaxcomm's kernels between "
                "nodes, and without them on_overflow='raise' does not work; pass on_overflow='drop' and look at "
                "Routing.dropped"
            )
        refuse_unchecked(layout.call)
    return False


# The limits of ffi/cuda/program/rail_row_args.h: shared memory of a thread block, and its part for copied rows, between
# nodes and inside one: the kernel depends on what NCCL finds.
_MOST_SHARED_BYTES, _MOVES_BYTES, _MOVES_IN_NODE_BYTES = 48 << 10, 12 << 10, 16 << 10


def fits_rails(tokens: int, choices: int, num_experts: int) -> bool:
    """Whether the kernels between nodes take these sizes, also in the gradient, which dispatches a row per choice."""
    marks = 12 * -(-tokens * choices // 64)
    each, sums = 4 * choices + 16, 4 * num_experts
    between_nodes = max(_MOVES_BYTES, each) + sums + 16 + marks
    return max(between_nodes, max(_MOVES_IN_NODE_BYTES, each) + sums) <= _MOST_SHARED_BYTES


def _uses_rails(ctx, layout, platform):
    """Whether the kernels between nodes move the rows. By default, other sizes travel by XLA's collective."""
    if not _lowering.uses_rails(ctx, layout.call, platform):
        return False
    tokens, choices = ctx.avals_in[-4].shape
    return layout.call.algorithm is not None or fits_rails(tokens, choices, ctx.avals_in[-2].shape[1])


def _lower_native_dispatch(ctx, *args, platform, layout):
    def run(*args):
        *xs, slot, expert, table, starts = args
        whole, order = _slices(layout, slot, expert, table, starts)
        operands = _compat.equally_varying(join(xs), order, whole)
        total, choices = table.shape[1], slot.shape[1]
        return parts(dispatch_rows_p.bind(*operands, layout=layout, num_experts=total, choices=choices), xs)

    return _compat.mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _no_xla(*xs):
    raise AssertionError("only calls that use jaxcomm's own collectives are lowered here")


def _attributes(rows, layout, num_experts, choices):
    return {
        "row_count": np.int64(rows.shape[1]),
        "choices": np.int64(choices),
        "num_experts": np.int64(num_experts),
        "per_choice": np.int64(layout.per_choice),
    }


def _lower_dispatch_rows(ctx, *args, platform, layout, num_experts, choices):
    return _lowering.lower(
        ctx,
        *args,
        platform=platform,
        call=layout.call,
        target="jaxcomm_dispatch",
        attributes=lambda x, n: _attributes(x, layout, num_experts, choices),
        alone=None,
        xla=_no_xla,
    )


def _lower_native_combine(ctx, rows, *args, platform, layout):
    total = ctx.avals_in[-1].shape[0]

    def run(rows, *args):
        *weights, slot, expert, table, starts = args
        adds = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
        own = weights[0].astype(adds) if weights else jnp.zeros(0, adds)
        operands = _compat.equally_varying(rows, slot, expert, own, _slices(layout, slot, expert, table, starts)[0])
        return combine_rows_p.bind(*operands, layout=layout, num_experts=total, weighted=bool(weights))

    return _compat.mlir.lower_fun(run, multiple_results=False)(ctx, rows, *args)


def _lower_combine_rows(ctx, *args, platform, layout, num_experts, weighted):
    choices = ctx.avals_in[1].shape[1]
    return _lowering.lower(
        ctx,
        *args,
        platform=platform,
        call=layout.call,
        target="jaxcomm_combine",
        attributes=lambda rows, n: {
            **_attributes(rows, layout, num_experts, choices),
            "home": np.int64(layout.reduce == "home"),
            "weighted": np.int64(weighted),
        },
        alone=None,
        xla=_no_xla,
    )


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _adds_natively(dtype, weighted, reduce):
    """Whether the executor adds rows of this type: floats with or without weights, others without."""
    if str(dtype) in _FLOATS:
        return True
    return not weighted and (reduce == "home" or not jnp.issubdtype(dtype, jnp.inexact)) and dtype.itemsize > 1


def _lower_combine(ctx, *args, platform, layout):
    layout = _named(ctx, layout, platform)
    rows, weighted = ctx.avals_in[0], len(args) > 5
    native = ctx.avals_in[-4].shape[1] > 0 and _is_native(ctx, layout, platform)
    exact = layout.per_choice or _adds_natively(rows.dtype, weighted, layout.reduce)
    if native and platform == "cpu" and exact:
        return _lower_native_combine(ctx, *args, platform=platform, layout=layout)
    per_node = _lowering.ranks_per_node_of(ctx, layout.call, platform)
    if native and platform == "cuda":
        # The kernel between nodes adds node by node; the one inside a node does not.
        one_node = layout.reduce == "home" or per_node == ctx.avals_in[-2].shape[0]
        adds = one_node or _uses_rails(ctx, layout, platform)
        if layout.per_choice or (str(rows.dtype) in _FLOATS and adds):
            return _lower_native_combine(ctx, *args, platform=platform, layout=layout)
    by = _combine_by_choices if native and platform == "cuda" else _combine_by_exchange
    run = functools.partial(by, layout=layout, ranks_per_node=per_node)
    return _compat.mlir.lower_fun(run, multiple_results=False)(ctx, *args)


def dispatch(xs: list, routing: Routing, layout: Layout) -> list:
    """[(T or T K, W), ...] -> [(C, W), ...]."""
    where = (routing.slot, routing.expert, routing.table, routing.starts())
    return dispatch_at(xs, where, layout)


def dispatch_at(xs, where, layout):
    return dispatch_p.bind(*_compat.equally_varying(*xs, *where), layout=layout)


def combine(rows: jax.Array, routing: Routing, weights: jax.Array | None, layout: Layout) -> jax.Array:
    """(C, W), weights (T, K) -> (T, W), or (T K, W) per choice."""
    where = (routing.slot, routing.expert, routing.table, routing.starts())
    return _combine(rows, [] if weights is None else [weights], where, layout)


def _combine(rows, weights, where, layout):
    return combine_p.bind(*_compat.equally_varying(rows, *weights, *where), layout=layout)


def _dispatch_shape(*args, layout):
    return [x.update(shape=(layout.capacity, *x.shape[1:]), weak_type=False) for x in args[:-4]]


def _combine_shape(rows, *args, layout):
    slot = args[-4]
    return rows.update(shape=(slot.size if layout.per_choice else slot.shape[0], *rows.shape[1:]), weak_type=False)


def _dispatch_jvp(primals, tangents, *, layout):
    *xs, _, _, _, _ = primals
    results, where = dispatch_p.bind(*primals, layout=layout), primals[-4:]
    moving = [i for i in range(len(xs)) if type(tangents[i]) is not _compat.ad.Zero]
    moved = iter(dispatch_at([tangents[i] for i in moving], where, layout) if moving else [])
    return results, [next(moved) if i in moving else _compat.zero_tangent(r) for i, r in enumerate(results)]


def _dispatch_transpose(cts, *args, layout):
    where = args[-4:]
    results: list[Any] = []
    for ct, x in zip(cts, args[:-4], strict=True):
        if not _compat.ad.is_undefined_primal(x):
            results.append(None)
        elif type(ct) is _compat.ad.Zero:
            results.append(_compat.ad.Zero(x.aval))
        else:
            _check_gradient(x.aval.dtype, layout.call)
            results.append(_combine(ct, [], where, layout))
    return [*results, None, None, None, None]


def _check_gradient(dtype, call):
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"moe.dispatch at {call.site}: a gradient of {jnp.dtype(dtype)} would be rounded to that type; use "
            "jaxcomm.moe.dispatch_quantized, or apply jax.lax.stop_gradient to x"
        )


def _combine_jvp(primals, tangents, *, layout):
    rows, *weights = primals[:-4]
    where = primals[-4:]
    result = combine_p.bind(*primals, layout=layout)
    terms = []
    if type(tangents[0]) is not _compat.ad.Zero:
        terms.append(_combine(tangents[0], weights, where, layout))
    if weights and type(tangents[1]) is not _compat.ad.Zero:
        terms.append(_combine(rows, [tangents[1]], where, layout))
    return result, functools.reduce(_compat.ad.add_tangents, terms) if terms else _compat.zero_tangent(result)


def _combine_transpose(ct, *args, layout):
    where, (rows, *weights) = args[-4:], args[:-4]
    results = [None] * len(args)
    undefined = _compat.ad.is_undefined_primal
    if type(ct) is _compat.ad.Zero:
        return [_compat.ad.Zero(a.aval) if undefined(a) else None for a in args]
    each = dataclasses.replace(layout, per_choice=True)
    (sent,) = dispatch_at([ct], where, layout)
    if undefined(rows):
        results[0] = sent
        if weights:
            adds = wide(sent.dtype)
            (own,) = dispatch_at([weights[0].reshape(-1, 1)], where, each)
            results[0] = (sent.astype(adds) * own.astype(adds)).astype(sent.dtype)
    elif undefined(weights[0]):
        adds = wide(rows.dtype)
        products = jnp.sum(sent.astype(adds) * rows.astype(adds), 1, keepdims=True)
        at_home = _combine(products, [], where, each)
        results[1] = at_home.reshape(weights[0].aval.shape).astype(weights[0].aval.dtype)
    return results


def _check_batch(axis_data, dims, call):
    if axis_data.name in call.axes:
        raise NotImplementedError(f"{call.op}: {axis_data.name!r} is an axis of vmap, expected axes of a mesh")
    if any(d is not None for d in dims[-4:]):
        raise NotImplementedError(f"{call.op}: the routing has a dimension of vmap; route and call it without vmap")


def merge(x, d, size):
    """The batch as a part of the rows."""
    x = jnp.broadcast_to(x[:, None], (x.shape[0], size, x.shape[1])) if d is None else jnp.moveaxis(x, d, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def split(y, size):
    return y.reshape(y.shape[0], size, y.shape[1] // size)


def _dispatch_batch(axis_data, args, dims, *, layout):
    _check_batch(axis_data, dims, layout.call)
    merged = [merge(x, d, axis_data.size) for x, d in zip(args[:-4], dims[:-4], strict=True)]
    results = [split(y, axis_data.size) for y in dispatch_p.bind(*merged, *args[-4:], layout=layout)]
    return results, [1] * len(results)


def _combine_batch(axis_data, args, dims, *, layout):
    _check_batch(axis_data, dims, layout.call)
    rows, *weights = args[:-4]
    merged = merge(rows, dims[0], axis_data.size)
    if not weights or dims[1] is None:
        return split(combine_p.bind(merged, *weights, *args[-4:], layout=layout), axis_data.size), 1
    # One row per choice comes home, because each element of the batch has its own weights.
    each = dataclasses.replace(layout, per_choice=True)
    choices = split(combine_p.bind(merged, *args[-4:], layout=each), axis_data.size)
    own = jnp.moveaxis(weights[0], dims[1], 2)  # (T, K, batch)
    adds = wide(rows.dtype)
    choices = choices.reshape(*own.shape, -1).astype(adds) * own[..., None].astype(adds)
    total = functools.reduce(jnp.add, [choices[:, k] for k in range(own.shape[1])])
    return total.astype(rows.dtype), 1


dispatch_p = register(
    "moe_dispatch",
    shape=_dispatch_shape,
    lower=_lower_dispatch,
    jvp=_dispatch_jvp,
    transpose=_dispatch_transpose,
    batch=_dispatch_batch,
    multiple_results=True,
)
combine_p = register(
    "moe_combine",
    shape=_combine_shape,
    lower=_lower_combine,
    jvp=_combine_jvp,
    transpose=_combine_transpose,
    batch=_combine_batch,
)

# Inside the lowering of the two: what the executor does.
dispatch_rows_p = register(
    "moe_dispatch_rows",
    shape=lambda x, order, table, *, layout, **_: x.update(shape=(layout.capacity, x.shape[1]), weak_type=False),
    lower=_lower_dispatch_rows,
)
combine_rows_p = register(
    "moe_combine_rows",
    shape=lambda rows, slot, expert, weights, table, *, layout, **_: rows.update(
        shape=(slot.size if layout.per_choice else slot.shape[0], rows.shape[1]), weak_type=False
    ),
    lower=_lower_combine_rows,
)
