"""route_and_dispatch(): few tokens reach their experts in one exchange, without an exchange of counts first."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _check, _compat, _lowering
from jaxcomm._primitive import register
from jaxcomm._typing import AxisName, PyTree
from jaxcomm.moe import exchange, payload
from jaxcomm.moe.check import lower_local
from jaxcomm.moe.places import FIELDS
from jaxcomm.moe.routing import RouteCall, Routing, described, known_ids, prepare, route, route_prepared
from jaxcomm.ops.all_gather import all_gather_p

# Up to this size of a rank's rows, one exchange of all rows costs less than two exchanges. Measured on AMD EPYC (2
# cores, rows of 4 KiB, 2026-11): with 8 processes of one device, 1 to 8 tokens gain a sixth and 32 tokens nothing. In
# one process, an exchange costs little, and only 1 token gains.
LARGEST_ROWS, LARGEST_ROWS_IN_ONE_PROCESS = 32 << 10, 4 << 10
# On GPUs, by the cost model, not measured: for 8 choices of 256 experts on 8 GPUs, the flags of LL messages then cost
# 7 us if dispatch sends a row once per rank. The exchange saves an all_gather and the barriers of dispatch, 9 us, and
# the sort of the ids, which the model does not have.
LARGEST_ROWS_ON_GPUS = 512 << 10
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
        dispatch(), after route(). None selects "one_shot" for rows of at most 32 KiB per rank (4 KiB in one process)
        on CPUs, and of at most 512 KiB on GPUs. GPUs of several hosts, and sizes that the kernel does not take, take
        route() and dispatch() in any case: see docs/internals/cuda-moe.md.
      max_sms: as for dispatch().

    Returns:
      The rows of dispatch(), with the same bits, and the result of route().

    Raises:
      ValueError: invalid shapes, numbers or algorithm (when tracing).
      jax.errors.JaxRuntimeError: as route() and dispatch(), or NVLink does not connect all GPUs of a host. They then
        need algorithm="xla" and on_overflow="drop" (at run time).

    Cost: one_shot: on CPUs an all_gather of T rows and T K integers; on GPUs an all_gather of T K integers of 16 bits,
      and one row per token and rank that has one of its experts.
    """
    op = "moe.route_and_dispatch"
    leaves, tree = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    tokens = jnp.shape(expert_ids)[:1]
    if algorithm == NAME and on_overflow != "raise":
        raise ValueError(f"{op}: algorithm {NAME!r} needs on_overflow='raise', got {on_overflow!r}")
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    limit = LARGEST_ROWS if jax.process_count() > 1 else LARGEST_ROWS_IN_ONE_PROCESS
    # The platform is known when lowering.
    on_cpus, on_gpus = (
        algorithm == NAME or (algorithm is None and on_overflow == "raise" and size <= most)
        for most in (limit, LARGEST_ROWS_ON_GPUS)
    )
    if not (on_cpus or on_gpus) or not leaves or any(leaf.shape[:1] != tokens for leaf in leaves):
        routing = route(
            expert_ids, axis_name, num_experts=num_experts, capacity=capacity, align=align, slots=slots,
            on_overflow=on_overflow, reduce=reduce,
        )  # fmt: skip
        algorithm = None if algorithm == NAME else algorithm
        return payload.dispatch(x, routing, algorithm=algorithm, max_sms=max_sms), routing
    for leaf in leaves:
        _check.element_type(op, leaf)
    prepared = prepare(op, expert_ids, axis_name, num_experts, capacity, align, slots, on_overflow, reduce)
    ids, call, total, rows = prepared
    call = dataclasses.replace(call, max_sms=_check.max_sms(op, max_sms))
    ids = _compat.make_varying(ids, call.axes)
    known = known_ids(ids, total)
    flat = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    spec = _Spec(call, total, rows, reduce, on_cpus, on_gpus)
    results = one_shot_p.bind(*_compat.equally_varying(known, *flat), spec=spec)
    moved = [r.reshape(len(r), *leaf.shape[1:]) for r, leaf in zip(results[len(FIELDS) :], leaves, strict=True)]
    return jax.tree.unflatten(tree, moved), spec.routing(results)


@dataclasses.dataclass(frozen=True)
class _Spec:
    call: RouteCall
    num_experts: int
    capacity: int
    reduce: str
    on_cpus: bool  # one exchange on CPUs; else route and dispatch
    on_gpus: bool

    def routing(self, results):
        fields = dict(zip(FIELDS, results[: len(FIELDS)], strict=True))
        return Routing(
            **fields, call=self.call, num_experts=self.num_experts, capacity=self.capacity, reduce=self.reduce
        )

    @property
    def layout(self) -> exchange.Layout:
        return exchange.Layout(self.call, self.capacity, False, self.reduce)

    def numbers(self, ids, leaves):
        return {
            "num_experts": np.int64(self.num_experts),
            "capacity": np.int64(self.capacity),
            "align": np.int64(self.call.align),
            "slots": np.int64(self.call.slots),
            "tokens": np.int64(ids.shape[0]),
            "choices": np.int64(ids.shape[1]),
            "payload_bytes": np.int64(sum(_bytes(leaf) for leaf in leaves)),
        }


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * jnp.dtype(_lowering.in_bytes(x.dtype)).itemsize


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _shape(ids, *leaves, spec):
    n = _check.group_size(spec.call.axes, None)
    local = spec.num_experts // n
    shapes = [ids.shape, ids.shape, (local,), (local,), (), (), (n, spec.num_experts)]
    fields = [ids.update(shape=shape, weak_type=False) for shape in shapes]
    return [*fields, *(leaf.update(shape=(spec.capacity, *leaf.shape[1:]), weak_type=False) for leaf in leaves)]


def _without_one_shot(ids, *leaves, spec):
    """The same by route() and dispatch()."""
    routing = route_prepared(ids, spec.call, spec.num_experts, spec.capacity, True, spec.reduce)
    fields = [getattr(routing, name) for name in FIELDS]
    return [*fields, *exchange.dispatch(list(leaves), routing, spec.layout)]


def _in_one_shot(ids, *leaves, spec):
    gather = _described(ids, leaves, spec)
    message = pack_p.bind(ids, *leaves, spec=spec)
    messages = all_gather_p.bind(message, call=gather, axis=0)
    return unpack_p.bind(messages, spec=spec, ids=_Shape.of(ids), leaves=tuple(_Shape.of(leaf) for leaf in leaves))


def _described(ids, leaves, spec):
    types = [f"rows of {leaf.shape[1]} {leaf.dtype}" for leaf in leaves]
    return described(spec.call, ids, spec.num_experts, spec.capacity, *types)


def _in_one_kernel(ids, *leaves, spec):
    call = _described(ids, leaves, spec)
    *fields, rows = kernel_p.bind(ids, exchange.join(leaves), spec=dataclasses.replace(spec, call=call))
    return [*fields, *exchange.parts(rows, leaves)]


# The limits of ffi/cuda/program/moe_one_shot_args.cc.
_MOST_SHARED_BYTES, _MOST_ARENA_BYTES, _MOST_EXPERTS = 48 << 10, 64 << 20, 2**15 - 1
_MOST_CHANNELS = 1024  # of any GPU: more than its multiprocessors


def fits_kernel(n: int, tokens: int, choices: int, num_experts: int, row_bytes: int) -> bool:
    """Whether the kernel for GPUs takes these sizes, whatever its number of thread blocks."""
    if min(tokens, choices, row_bytes) < 1 or num_experts > _MOST_EXPERTS:
        return False
    ids = -(-tokens * choices // 4)  # units of 8 bytes
    shared = 16 * n * ids + 4 * n * (num_experts + 1) + 12 * num_experts
    # A thread block has the ids, and of each row a multiple of 128 bytes: at most twice its share.
    lines = -(-row_bytes // 128)
    most = min(lines, max(tokens * row_bytes >> 14, 1), _MOST_CHANNELS)  # thread blocks
    units = most * ids + 2 * tokens * lines * 16
    arena = 8 * _MOST_CHANNELS + 2 * n * units * 16
    return shared <= _MOST_SHARED_BYTES and arena <= _MOST_ARENA_BYTES


@dataclasses.dataclass(frozen=True)
class _Shape:
    shape: tuple
    dtype: Any

    @classmethod
    def of(cls, x):
        return cls(tuple(x.shape), x.dtype)


def _lower(ctx, *args, platform, spec):
    if platform == "cpu":
        one_shot = spec.on_cpus and not _lowering.uses_xla(spec.call, platform)
        run = _in_one_shot if one_shot else _without_one_shot
    else:
        run = _in_one_kernel if _takes_kernel(ctx, spec, platform) else _without_one_shot
    return _compat.mlir.lower_fun(functools.partial(run, spec=spec), multiple_results=True)(ctx, *args)


def _takes_kernel(ctx, spec, platform):
    ids, *leaves = ctx.avals_in
    tokens, choices = ids.shape
    n = ctx.avals_out[FIELDS.index("table")].shape[0]
    row_bytes = sum(_bytes(leaf) for leaf in leaves) // max(tokens, 1)
    fits = spec.capacity > 0 and fits_kernel(n, tokens, choices, spec.num_experts, row_bytes)
    return spec.on_gpus and fits and _lowering.uses_row_kernel(ctx, spec.call, platform)


def _lower_kernel(ctx, ids, rows, *, platform, spec):
    numbers = spec.numbers(ctx.avals_in[0], ctx.avals_in[1:])
    return lower_local(
        ctx, ids, rows, platform=platform, call=spec.call, target="moe_one_shot", numbers=numbers, xla=_no_xla
    )


def _pack_shape(ids, *leaves, spec):
    size = 64 + _aligned(4 * math.prod(ids.shape)) + sum(_aligned(_bytes(leaf)) for leaf in leaves)
    return ids.update(shape=(1, size), dtype=jnp.dtype(jnp.uint8), weak_type=False)


def _unpack_shape(messages, *, spec, ids, leaves):
    like = lambda x: messages.update(shape=x.shape, dtype=jnp.dtype(x.dtype), weak_type=False)  # noqa: E731
    return _shape(like(ids), *map(like, leaves), spec=spec)


def _no_xla(*xs):
    raise AssertionError("only calls that use jaxcomm's own collectives are lowered here")


def _lower_pack(ctx, ids, *leaves, platform, spec):
    numbers = spec.numbers(ctx.avals_in[0], ctx.avals_in[1:])
    return lower_local(
        ctx, ids, *leaves, platform=platform, call=spec.call, target="moe_pack", numbers=numbers, xla=_no_xla
    )


def _lower_unpack(ctx, messages, *, platform, spec, ids, leaves):
    numbers = spec.numbers(ids, leaves)
    return lower_local(
        ctx, messages, platform=platform, call=spec.call, target="moe_unpack", numbers=numbers, xla=_no_xla
    )


def _jvp(primals, tangents, *, spec):
    results = one_shot_p.bind(*primals, spec=spec)
    routing = spec.routing(results)
    where = (routing.slot, routing.expert, routing.table, routing.starts())
    moving = [i for i, tangent in enumerate(tangents[1:]) if type(tangent) is not _compat.ad.Zero]
    moved = iter(exchange.dispatch_at([tangents[i + 1] for i in moving], where, spec.layout) if moving else [])
    rows = results[len(FIELDS) :]
    moved_rows = [next(moved) if i in moving else _compat.zero_tangent(r) for i, r in enumerate(rows)]
    return results, [*(_compat.zero_tangent(r) for r in results[: len(FIELDS)]), *moved_rows]


def _batch(axis_data, args, dims, *, spec):
    if axis_data.name in spec.call.axes:
        raise NotImplementedError(f"{spec.call.op}: {axis_data.name!r} is an axis of vmap, expected axes of a mesh")
    if dims[0] is not None:
        raise NotImplementedError(f"{spec.call.op}: expert_ids have a dimension of vmap; call it without vmap")
    size = axis_data.size
    merged = [exchange.merge(x, d, size) for x, d in zip(args[1:], dims[1:], strict=True)]
    results = one_shot_p.bind(args[0], *merged, spec=spec)
    fields, rows = results[: len(FIELDS)], results[len(FIELDS) :]
    return [*fields, *(exchange.split(y, size) for y in rows)], [None] * len(fields) + [1] * len(rows)


one_shot_p = register("moe_one_shot", shape=_shape, lower=_lower, jvp=_jvp, batch=_batch, multiple_results=True)
pack_p = register("moe_pack", shape=_pack_shape, lower=_lower_pack)
kernel_p = register("moe_one_kernel", shape=_shape, lower=_lower_kernel, multiple_results=True)
unpack_p = register("moe_unpack", shape=_unpack_shape, lower=_lower_unpack, multiple_results=True)
