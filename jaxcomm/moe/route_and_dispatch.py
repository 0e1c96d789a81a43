"""route_and_dispatch(): few tokens reach their experts in one exchange, without an exchange of counts first."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _check, _compat, _lowering
from jaxcomm._core import plan
from jaxcomm._primitive import register
from jaxcomm._typing import AxisName, PyTree
from jaxcomm.moe import primitives
from jaxcomm.moe.choice import takes_one_exchange
from jaxcomm.moe.dispatch_combine import dispatch
from jaxcomm.moe.routing import RouteCall, Routing, prepare, route, route_prepared
from jaxcomm.moe.row_assignment import FIELDS, assigned_shapes
from jaxcomm.moe.rows import join, row_bytes, separate

NAME = "one_shot"


def route_and_dispatch(
    x: PyTree,
    expert_ids: Any,
    axis_name: AxisName,
    *,
    num_experts: int,
    capacity: int | None = None,
    align: int = 1,
    slots: int | None = None,
    on_overflow: str = "raise",
    reduce: str = "node",
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> tuple[PyTree, Routing]:
    """route() and dispatch() in one call, which takes a single exchange if the tokens are few.

    Args:
      x: pytree of (T, ...) arrays, as for dispatch().
      expert_ids, axis_name, num_experts, capacity, align, slots, on_overflow, reduce: as for route().
      algorithm: "one_shot" sends ids and rows in one exchange; it needs on_overflow="raise". Other names are those of
        dispatch(), after route(). None selects "one_shot" for rows of at most 512 KiB per rank on GPUs, where the
        self-test has measured it as faster. CPUs, GPUs of several hosts, and sizes that the kernel does not take
        take route() and dispatch() in any case: see docs/internals/cuda-moe.md.
      max_sms: as for dispatch().

    Returns:
      The rows of dispatch(), with the same bits, and the result of route().

    Raises:
      ValueError: invalid shapes, numbers or algorithm (when tracing).
      jax.errors.JaxRuntimeError: as route() and dispatch(), or NVLink does not connect all GPUs of a host. They then
        need algorithm="xla" and on_overflow="drop" (at run time).

    Cost: one_shot: an all_gather of T K integers of 16 bits, and one row per token and rank that has one of its
      experts.
    """
    op = "moe.route_and_dispatch"
    options: dict[str, Any] = {
        "num_experts": num_experts, "capacity": capacity, "align": align, "slots": slots, "on_overflow": on_overflow,
        "reduce": reduce,
    }  # fmt: skip
    leaves, tree = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    tokens = jnp.shape(expert_ids)[:1]
    if algorithm == NAME and on_overflow != "raise":
        raise ValueError(f"{op}: algorithm {NAME!r} needs on_overflow='raise', got {on_overflow!r}")
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    may_send_once = on_overflow == "raise" and algorithm in (None, NAME)
    may_send_once &= bool(leaves) and all(leaf.shape[:1] == tokens for leaf in leaves)
    # The lowering knows the platform, and chooses for smaller sizes.
    if not may_send_once or (algorithm is None and size > plan.MAX_ONE_EXCHANGE_BYTES):
        routing = route(expert_ids, axis_name, **options)
        return dispatch(x, routing, algorithm=None if algorithm == NAME else algorithm, max_sms=max_sms), routing
    for leaf in leaves:
        _check.element_type(op, leaf)
    ids, call = prepare(op, expert_ids, axis_name, **options)
    call = dataclasses.replace(call, max_sms=_check.max_sms(op, max_sms))
    flat = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    operands = _compat.equally_varying(ids, *flat)
    routing, moved = _split(route_and_dispatch_p.bind(*operands, call=call, named=algorithm == NAME), call)
    moved = [r.reshape(len(r), *leaf.shape[1:]) for r, leaf in zip(moved, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved), routing


def _split(results: list[Any], call: RouteCall) -> tuple[Routing, list[Any]]:
    """The routing and the rows in the results of the primitive."""
    return Routing.of(results[: len(FIELDS)], call), results[len(FIELDS) :]


def _types(ids, *leaves, call, named):
    shapes = assigned_shapes(ids, call, _check.group_size(call.axes, None))
    arrays = [ids.update(shape=shape, weak_type=False) for shape in shapes]
    return [*arrays, *(leaf.update(shape=(call.capacity, *leaf.shape[1:]), weak_type=False) for leaf in leaves)]


def _lower(ctx, *operands, platform, call, named):
    ids, *leaves = ctx.avals_in
    arrays = ctx.avals_out[: len(FIELDS)]
    tokens, choices = ids.shape
    sized = dataclasses.replace(call, algorithm=NAME) if named else call
    sized = sized.with_sizes(ids, *(f"rows of {leaf.shape[1]} {leaf.dtype}" for leaf in leaves))
    one = _compat.in_spmd_region(ctx.module_context.axis_context)  # else route raises
    if one:
        site = _lowering.Site(ctx, sized, platform)
        one = takes_one_exchange(site, tokens, choices, sum(map(row_bytes, leaves)))
    if not one:
        by_two_calls = functools.partial(_route_then_dispatch, call=call)
        return _compat.mlir.lower_fun(by_two_calls, multiple_results=True)(ctx, *operands)
    numbers = {
        "num_experts": call.num_experts,
        "capacity": call.capacity,
        "align": call.align,
        "slots": call.slots,
        "tokens": tokens,
        "choices": choices,
    }
    attributes = {name: np.int64(number) for name, number in numbers.items()}

    def by_kernel(ids, *leaves):
        joined = join(leaves)
        rows = jax.ShapeDtypeStruct((call.capacity, joined.shape[1]), joined.dtype)
        kernel = _lowering.custom_call(site, "jaxcomm_moe_one_shot")
        *results, moved = kernel((ids, joined), [*arrays, rows], attributes)
        return [*results, *separate(moved, leaves)]

    return _lowering.lower_manual(ctx, *operands, call=call, run=by_kernel)


def _route_then_dispatch(ids, *leaves, call):
    routing = route_prepared(ids, call)
    arrays = [getattr(routing, name) for name in FIELDS]
    return [*arrays, *primitives.dispatch(list(leaves), routing.assignment(), call, False)]


def _jvp(primals, tangents, *, call, named):
    results = route_and_dispatch_p.bind(*primals, call=call, named=named)
    routing, rows = _split(results, call)
    moved = primitives.dispatch_tangents(tangents[1:], rows, routing.assignment(), call, False)
    return results, [*(_compat.zero_tangent(r) for r in results[: len(FIELDS)]), *moved]


def _batch(axis_data, operands, dims, *, call, named):
    primitives.check_batch(axis_data, dims[:1], call, "expert_ids have")
    if all(d is None for d in dims):
        results = route_and_dispatch_p.bind(*operands, call=call, named=named)
        return results, [None] * len(results)
    size = axis_data.size
    merged = [primitives.merge_batch(x, d, size) for x, d in zip(operands[1:], dims[1:], strict=True)]
    results = route_and_dispatch_p.bind(operands[0], *merged, call=call, named=named)
    arrays, rows = results[: len(FIELDS)], results[len(FIELDS) :]
    return [*arrays, *(primitives.split_batch(y, size) for y in rows)], [None] * len(arrays) + [1] * len(rows)


route_and_dispatch_p = register(
    "moe_one_shot", shape=_types, lower=_lower, jvp=_jvp, batch=_batch, multiple_results=True
)
