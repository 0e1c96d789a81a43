"""From mesh axes to replica groups to a custom call. The only file that sees MLIR."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _bootstrap, _compat, _cost_params, _placement
from jaxcomm._config import config
from jaxcomm._core import plan
from jaxcomm._native import register, register_cuda
from jaxcomm._typing import AnyMesh, AxisNames, Groups


@dataclasses.dataclass(frozen=True)
class Call:
    """What all collectives share: a static, hashable parameter of every primitive.

    Attributes:
      op: public name, for messages.
      axes: mesh axes that form the group, outermost first.
      groups: axis_index_groups, or None.
      algorithm: a name, or None to let the selection table choose.
      max_sms: of a GPU, or None for JAXCOMM_MAX_SMS.
      site: where the user called the op, for messages.
    """

    op: str
    axes: AxisNames
    groups: Groups
    algorithm: str | None
    max_sms: int | None
    site: str

    def over(self, axes: AxisNames) -> "Call":
        return dataclasses.replace(self, axes=axes)


def replica_groups(axis_names: AxisNames, axis_sizes: tuple[int, ...], axes: AxisNames, groups: Groups) -> np.ndarray:
    """Logical device ids (row-major positions in the mesh), one row per group, in rank order: (groups, group size)."""
    ids = np.arange(math.prod(axis_sizes)).reshape(axis_sizes)
    where = [axis_names.index(a) for a in axes]
    size = math.prod(axis_sizes[i] for i in where)
    rows = np.moveaxis(ids, where, range(-len(where), 0)).reshape(-1, size)
    if groups is None:
        return rows
    return np.stack([row[list(group)] for row in rows for group in groups])


def ranks_per_node(axis_sizes: tuple[int, ...], groups: Groups) -> int:
    """Ranks that share a node, from the sizes of the named axes, outermost first.

    Several axes declare a hierarchy: the innermost one stays inside a node. Everything else is one node, since all
    devices are of one process.
    """
    if groups is not None:
        return len(groups[0])
    sizes = [size for size in axis_sizes if size > 1]
    return sizes[-1] if len(sizes) > 1 else math.prod(sizes)


def _place(mesh: AnyMesh, call: Call, rows: np.ndarray, platform: str) -> tuple[int, bool, dict[str, Any]]:
    """Makes the back end ready. Returns ranks per node, whether a group is of one node, attributes of this platform."""
    _bootstrap.warn_if_alone()
    try:
        if platform == "cuda":
            # Which GPUs share a node is found at run time, by NCCL.
            register_cuda()
            own: dict[str, Any] = {}
            if not _compat.provides_communicators():
                own["members"] = _placement.gpu_groups(mesh, rows)
            elif _compat.has_windows() and _bootstrap.symmetric_buffers(mesh):
                own["windows"] = np.int64(1)
            return rows.shape[1], True, own
        register()
        _cost_params.load()
        placement = _placement.placement(mesh, rows)
    except (ImportError, RuntimeError) as error:  # the traceback shows the call, but a log may not show that
        raise RuntimeError(f"jaxcomm: {call.op} at {call.site}: while compiling, {error}") from error
    sizes = tuple(mesh.axis_sizes[mesh.axis_names.index(a)] for a in call.axes)
    per_node = placement.ranks_per_node or ranks_per_node(sizes, call.groups)
    return per_node, placement.ranks_per_node is None, {"processes": placement.processes}


def _call_attributes(mesh: AnyMesh, call: Call, rows: np.ndarray, collective: str, platform: str) -> dict[str, Any]:
    """Attributes that every collective has. Arrays must stand at the top level, everything else is in `call`."""
    per_node, one_node, own = _place(mesh, call, rows, platform)
    if call.algorithm is not None:
        n = rows.shape[1]
        if platform == "cuda":  # nodes are found at run time: see _place
            shapes = [size for size in range(1, n + 1) if n % size == 0]
            possible = [plan.gpu_request(collective, n, size, multimem=True, source_of=range(n)) for size in shapes]
        else:
            scope = "node" if one_node else "network"
            possible = [plan.cpu_request(collective, scope, n, per_node, source_of=range(n))]
        _check_algorithm(call, call.algorithm, possible)
    attributes = {
        "op": call.op,
        "site": call.site,
        "algorithm": call.algorithm or "",
        "group_size": np.int64(rows.shape[1]),
        "ranks_per_node": np.int64(per_node),
        "max_sms": np.int64(call.max_sms or 0),
    }
    return {
        "call": attributes,
        "groups": rows.reshape(-1).astype(np.int64),
        **own,
    }


def _local_shape(aval: Any, mesh: AnyMesh) -> tuple[int, ...]:
    """Shape on one device: over explicit mesh axes that are not manual, types show the whole array."""
    shape = list(aval.shape)
    for dimension, names in enumerate(aval.sharding.spec):
        for name in names if isinstance(names, tuple) else (names,) if names is not None else ():
            shape[dimension] //= mesh.axis_sizes[mesh.axis_names.index(name)]
    return tuple(shape)


# XLA:CPU packs elements of less than a byte: they travel in a type that holds every value in a byte of its own.
_IN_BYTES = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float8_e4m3fn,
}


def _in_bytes(dtype: Any) -> Any:
    return _IN_BYTES.get(str(dtype), dtype)


def _check_algorithm(call: Call, algorithm: str, possible: Sequence[Any]) -> None:
    """Raises unless the algorithm takes one of the requests. The executor would only say so at run time."""
    if any(plan.supports(request, algorithm) for request in possible):
        return
    machine = plan.machine_of("process", possible[-1].num_ranks)
    reason = plan.select(possible[-1], algorithm, 1, machine).reason
    raise ValueError(f"{call.op} at {call.site}: {reason}")


def register_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers a lowering rule that takes the keyword `platform`: "cpu", "cuda", or "other", which has no handlers."""
    for platform in ("cpu", "cuda"):
        _compat.mlir.register_lowering(primitive, functools.partial(rule, platform=platform), platform=platform)
    _compat.mlir.register_lowering(primitive, functools.partial(rule, platform="other"))


@functools.cache
def _log_platform() -> None:
    logging.getLogger("jaxcomm").warning("jaxcomm has no collectives for this platform: XLA's own are used")


def _uses_xla(call: Call, platform: str) -> bool:
    """Whether a call becomes XLA's own collective."""
    if "xla" in (call.algorithm, config().algorithm):
        return True
    if platform != "other":
        return False
    if call.algorithm is not None:
        raise NotImplementedError(
            f"{call.op} at {call.site}: algorithm {call.algorithm!r} runs on CPU and CUDA only; leave it out, or pass "
            "algorithm='xla'"
        )
    _log_platform()
    return True


def lower(
    ctx: Any,
    *xs: Any,
    platform: str,
    call: Call,
    target: str,
    attributes: Callable[[Any, int], dict[str, Any]],
    alone: Callable[..., Any] | None,
    xla: Callable[..., Any],
    in_place: bool = False,
) -> Any:
    """Lowers one collective to one custom call per device, or to XLA's own collective.

    Args:
      ctx: lowering context; its avals give the shapes of operands and results.
      xs: operands.
      platform: "cpu", "cuda" or "other".
      target: FFI target.
      attributes: (first operand on one device, group size) -> attributes of the custom call, beyond those that every
        collective has.
      alone: what a group of one rank computes; None calls the target there too. So does, on GPUs, an algorithm that the
        user has asked for: how the handlers are tried out on a single GPU.
      xla: the same computation by collectives of jax.lax, (*xs) -> results.
      in_place: alias every operand to the result of the same number.
    """
    axis_context = ctx.module_context.axis_context
    if not _compat.in_spmd_region(axis_context):
        raise NotImplementedError(f"{call.op} works inside jax.shard_map only (called at {call.site})")
    mesh = axis_context.mesh
    rows = replica_groups(mesh.axis_names, mesh.axis_sizes, call.axes, call.groups)
    group_size = rows.shape[1]
    uses_xla = _uses_xla(call, platform)
    common = {} if uses_xla else _call_attributes(mesh, call, rows, target.removeprefix("jaxcomm_"), platform)
    out_types = [jax.ShapeDtypeStruct(_local_shape(a, mesh), _in_bytes(a.dtype)) for a in ctx.avals_out]

    def exchange(*xs):
        # The rank comes from the mesh position, not from the device: that survives permuted and exported meshes.
        rank = jnp.int32(0)
        for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
            rank = rank * size + lax.axis_index(name).astype(jnp.int32)
        # The side effect keeps XLA from merging or dropping calls on some devices only. It stays inside the lowering:
        # on the primitive it would stop jax.checkpoint in 0.10.
        aliases = {i + 1: i for i in range(len(xs))} if in_place else None
        whole = [x.astype(_in_bytes(x.dtype)) for x in xs]
        ffi_call = jax.ffi.ffi_call(target, out_types, has_side_effect=True, input_output_aliases=aliases)
        windows = "windows" in common and not in_place  # of the barrier nobody reads anything
        with _compat.in_collective_memory(operand=1, result=0) if windows else contextlib.nullcontext():
            ys = ffi_call(rank, *whole, **common, **attributes(whole[0], group_size))
        return [y.astype(a.dtype) for y, a in zip(ys, ctx.avals_out, strict=True)]

    def exchange_by_xla(*xs):
        if not any(math.prod(out.shape) for out in out_types):  # XLA refuses some of these
            return [jnp.zeros(out.shape, a.dtype) for out, a in zip(out_types, ctx.avals_out, strict=True)]
        ys = xla(*(x.astype(_in_bytes(x.dtype)) for x in xs))
        return [y.astype(a.dtype) for y, a in zip(ys, ctx.avals_out, strict=True)]

    def manual(*xs):
        run = exchange_by_xla if uses_xla else exchange
        if group_size == 1 and alone is not None and not (platform == "cuda" and call.algorithm):
            return [alone(x, a.shape) for x, a in zip(xs, ctx.avals_out, strict=True)]
        if set(axis_context.manual_axes) == set(mesh.axis_names):
            return run(*xs)
        # Neither axis_index nor a side effect can be used over an axis that is not manual, so make the rest manual too.
        # The types tell how explicit axes shard the operands; over automatic axes these are gathered.
        in_specs = tuple(jax.typeof(x).sharding.spec for x in xs)
        out_specs = [a.sharding.spec for a in ctx.avals_out]
        return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*xs)

    return _compat.mlir.lower_fun(manual, multiple_results=True)(ctx, *xs)
