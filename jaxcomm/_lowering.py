"""Lowers a collective: mesh axes -> replica groups -> custom call. Only this file handles MLIR."""

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

from jaxcomm import _bootstrap, _compat, _cost_params, _placement, _selftest_record, _xla_hierarchical
from jaxcomm._config import config
from jaxcomm._core import plan
from jaxcomm._native import register, register_cuda
from jaxcomm._typing import AnyMesh, AxisNames, Groups


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments that all collectives share: a static, hashable parameter of every primitive.

    Attributes:
      op: public name, for messages.
      axes: mesh axes that form the group, outermost first.
      groups: axis_index_groups, or None.
      algorithm: name of an algorithm; None lets the selection table choose.
      max_sms: multiprocessors of a GPU that the call may occupy; None means JAXCOMM_MAX_SMS.
      site: call site in the user's program, for messages.
      asynchronous: whether computations may run beside the transfer, until _pending.done_p ends it.
      token: tells apart the asynchronous calls of a process. JAX lowers equations with equal parameters once.
    """

    op: str
    axes: AxisNames
    groups: Groups
    algorithm: str | None
    max_sms: int | None
    site: str
    asynchronous: bool = False
    token: int = dataclasses.field(default=0, repr=False)

    def over(self, axes: AxisNames) -> "Call":
        return dataclasses.replace(self, axes=axes)


def replica_groups(axis_names: AxisNames, axis_sizes: tuple[int, ...], axes: AxisNames, groups: Groups) -> np.ndarray:
    """Logical device ids (row-major positions in the mesh) of the groups, in rank order: (groups, group size)."""
    ids = np.arange(math.prod(axis_sizes)).reshape(axis_sizes)
    where = [axis_names.index(a) for a in axes]
    size = math.prod(axis_sizes[i] for i in where)
    rows = np.moveaxis(ids, where, range(-len(where), 0)).reshape(-1, size)
    if groups is None:
        return rows
    return np.stack([row[list(group)] for row in rows for group in groups])


def ranks_per_node(axis_sizes: tuple[int, ...], groups: Groups) -> int:
    """Ranks per node of a group whose devices belong to one process.

    Several axes declare a hierarchy: the innermost axis stays inside a node. Other groups are one node.

    Args:
      axis_sizes: sizes of the named axes, outermost first.
      groups: axis_index_groups, or None.
    """
    if groups is not None:
        return len(groups[0])
    sizes = [size for size in axis_sizes if size > 1]
    return sizes[-1] if len(sizes) > 1 else math.prod(sizes)


def _axis_sizes(mesh: AnyMesh, call: Call) -> tuple[int, ...]:
    sizes = tuple(mesh.axis_sizes[mesh.axis_names.index(a)] for a in call.axes)
    return sizes


def _place(
    mesh: AnyMesh, call: Call, rows: np.ndarray, platform: str, exported: bool
) -> tuple[int, bool, dict[str, Any]]:
    """Registers targets and connects processes. `exported`: other devices than those of the mesh may run the program.

    Returns:
      Ranks per node, whether each group is on one node, and the attributes of this platform.
    """
    _bootstrap.warn_if_alone()
    try:
        if platform == "cuda":
            # NCCL finds the nodes of GPUs at run time.
            register_cuda()
            own: dict[str, Any] = {}
            processes = None if exported else _placement.gpu_processes(mesh, rows)
            if processes is not None:  # else the GPUs of a process do not meet before the first run
                own["processes"] = processes
            if not _compat.provides_communicators():
                own["members"] = _placement.gpu_groups(mesh, rows)
            # No windows for starts yet: docs/internals/cuda.md, Lanes.
            elif not call.asynchronous and no_windows(mesh) is None:
                own["symmetric_buffers"] = np.int64(1)
            return rows.shape[1], True, own
        register()
        _cost_params.load()
        placement = _placement.placement(mesh, rows)
    except (ImportError, RuntimeError) as error:  # logs may lack the traceback, so the text names the call
        raise RuntimeError(f"jaxcomm: {call.op} at {call.site}: while compiling, {error}") from error
    sizes = _axis_sizes(mesh, call)
    per_node = placement.ranks_per_node or ranks_per_node(sizes, call.groups)
    own = {"processes": placement.processes}
    if placement.devices.size and not exported:
        own["devices"] = placement.devices
    return per_node, placement.ranks_per_node is None, own


def no_windows(mesh: AnyMesh) -> str | None:
    """Why XLA makes no windows on its buffers; None if it does. The same in all processes of the mesh.

    Raises:
      RuntimeError: as _bootstrap.symmetric_buffers.
    """
    if not _compat.has_windows():
        return "XLA has windows on its buffers from jax 0.12 on"
    if not _bootstrap.symmetric_buffers(mesh):
        return "JAXCOMM_SYMMETRIC_BUFFERS is not 1 in all processes"
    return None


def _call_attributes(
    mesh: AnyMesh, call: Call, rows: np.ndarray, collective: str, platform: str, exported: bool
) -> dict[str, Any]:
    """Attributes that every collective has. Arrays must be at the top level; `call` has the others."""
    per_node, one_node, own = _place(mesh, call, rows, platform, exported)
    algorithm = None if collective == "fused_matmul" else call.algorithm  # of a plan
    if algorithm is not None:
        n = rows.shape[1]
        if platform == "cuda":  # see _place: nodes are unknown here
            shapes = [size for size in range(1, n + 1) if n % size == 0]
            possible = [plan.gpu_request(collective, n, size, multimem=True, source_of=range(n)) for size in shapes]
        else:
            scope = "node" if one_node else "network"
            possible = [plan.cpu_request(collective, scope, n, per_node, source_of=range(n))]
        _check_algorithm(call, algorithm, possible)
    attributes = {
        "op": call.op,
        "site": call.site,
        "algorithm": algorithm or "",
        "group_size": np.int64(rows.shape[1]),
        "ranks_per_node": np.int64(per_node),
        "max_sms": np.int64(call.max_sms or 0),
    }
    if call.asynchronous:
        attributes["asynchronous"] = np.int64(1)
    return {
        "call": attributes,
        "groups": rows.reshape(-1).astype(np.int64),
        **own,
    }


def _local_shape(aval: Any, mesh: AnyMesh) -> tuple[int, ...]:
    """Shape on one device. Types have the global shape over explicit mesh axes that are not manual."""
    shape = list(aval.shape)
    for dimension, names in enumerate(aval.sharding.spec):
        for name in names if isinstance(names, tuple) else (names,) if names is not None else ():
            shape[dimension] //= mesh.axis_sizes[mesh.axis_names.index(name)]
    return tuple(shape)


# XLA:CPU packs elements smaller than a byte. They are sent as a type of one byte that holds every value.
_IN_BYTES = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float8_e4m3fn,
}


def in_bytes(dtype: Any) -> Any:
    """The type in which elements of this type are sent."""
    return _IN_BYTES.get(str(dtype), dtype)


def _check_algorithm(call: Call, algorithm: str, possible: Sequence[Any]) -> None:
    """Raises unless the algorithm supports one of the requests. The executor raises only at run time."""
    if any(plan.supports(request, algorithm) for request in possible):
        return
    machine = plan.machine_of("process", possible[-1].num_ranks)
    try:
        plan.select(possible[-1], algorithm, 1, machine)
    except ValueError as error:
        raise ValueError(f"{call.op} at {call.site}: {error}") from None


def register_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers a lowering rule with the keyword `platform`: "cpu", "cuda" or "other" (no handlers)."""
    for platform in ("cpu", "cuda"):
        _compat.mlir.register_lowering(primitive, functools.partial(rule, platform=platform), platform=platform)
    _compat.mlir.register_lowering(primitive, functools.partial(rule, platform="other"))


@functools.cache
def _log_platform() -> None:
    logging.getLogger("jaxcomm").warning("jaxcomm has no collectives for this platform: it uses XLA's own collectives")


@functools.cache
def _log_untested() -> None:
    logging.getLogger("jaxcomm").warning(
        "jaxcomm uses XLA's own collectives on these GPUs until its self-test has passed with this driver, NCCL, "
        "jaxlib and jaxcomm: run `python -m jaxcomm.selftest` with the launcher of the program, or set "
        "JAXCOMM_ALGORITHM=plans"
    )


_use_plans = False


def use_plans() -> None:
    """Programs that are compiled from now on use jaxcomm's own collectives on GPUs, as with JAXCOMM_ALGORITHM=plans."""
    global _use_plans
    _use_plans = True


def selects_xla(algorithm: str | None, platform: str) -> bool:
    """Whether this argument `algorithm`, the settings or a missing self-test select XLA's own collectives."""
    if config().algorithm == "xla" or algorithm in ("xla", _xla_hierarchical.NAME):
        return True
    if platform == "cuda" and algorithm is None:
        if _use_plans or config().algorithm == "plans" or _selftest_record.passed():
            return False
        _log_untested()
        return True
    return False


def uses_xla(call: Call, platform: str) -> bool:
    """Whether a call is lowered to XLA's own collective."""
    if selects_xla(call.algorithm, platform):
        return True
    if platform != "other":
        return False
    if call.algorithm is not None:
        raise NotImplementedError(
            f"{call.op} at {call.site}: algorithm {call.algorithm!r} runs on CPU and CUDA only; remove it, or pass "
            "algorithm='xla'"
        )
    _log_platform()
    return True


def ranks_per_node_of(ctx: Any, call: Call, platform: str) -> int:
    """Ranks per node of the groups of a call that is being lowered."""
    mesh = ctx.module_context.axis_context.mesh
    sizes = _axis_sizes(mesh, call)
    if platform != "cpu":
        return ranks_per_node(sizes, call.groups)
    rows = replica_groups(mesh.axis_names, mesh.axis_sizes, call.axes, call.groups)
    return _place(mesh, call, rows, platform, _compat.is_exported(ctx))[0]


def levels(ctx: Any, call: Call, platform: str) -> _xla_hierarchical.Levels | None:
    """Node groups and rail groups, if the call is composed of XLA's collectives over them; else None.

    With JAXCOMM_ALGORITHM=xla, on one node, and with one rank per node, one collective of XLA runs instead.
    """
    axis_context = ctx.module_context.axis_context
    if call.algorithm != _xla_hierarchical.NAME or config().algorithm == "xla":
        return None
    if not _compat.in_spmd_region(axis_context):
        return None  # lower() raises
    mesh = axis_context.mesh
    rows = replica_groups(mesh.axis_names, mesh.axis_sizes, call.axes, call.groups)
    sizes = _axis_sizes(mesh, call)
    per_node = _placement.ranks_per_node_for_xla(mesh, rows, platform) or ranks_per_node(sizes, call.groups)
    if per_node in (1, rows.shape[1]):
        return None
    return _xla_hierarchical.Levels.of(call.axes, math.prod(sizes), call.groups, per_node)


def is_on_one_host(ctx: Any, call: Call) -> bool:
    """Whether NVLink may connect all GPUs of each group of a call that is being lowered."""
    axis_context = ctx.module_context.axis_context
    if not _compat.in_spmd_region(axis_context):
        return True  # lower() raises
    mesh = axis_context.mesh
    rows = replica_groups(mesh.axis_names, mesh.axis_sizes, call.axes, call.groups)
    return _placement.gpus_are_on_one_host(mesh, rows)


def uses_row_kernel(ctx: Any, call: Call, platform: str, names: Sequence[str] = ("direct",)) -> bool:
    """Whether GPUs move the rows of a call over slices by jaxcomm's kernel, which checks the table before a row moves.

    The kernel works inside a node. Between nodes, and where jaxcomm's kernels are not used, XLA's own collective runs.

    Args:
      names: algorithms that are this kernel inside a node.
    """
    if platform != "cuda" or call.algorithm not in (None, *names):
        return False
    return not uses_xla(call, platform) and is_on_one_host(ctx, call)


def uses_rails(ctx: Any, call: Call, platform: str) -> bool:
    """Whether GPUs of several hosts move the rows of a dispatch or combine by jaxcomm's kernels between nodes.

    The kernels need GIN between the nodes, which NCCL reports at run time only. So a program has to ask for them, or
    the self-test has run them on such GPUs.
    """
    if platform != "cuda" or call.algorithm not in (None, "hierarchical"):
        return False
    if uses_xla(call, platform) or is_on_one_host(ctx, call):
        return False
    return call.algorithm is not None or _selftest_record.passed_between_nodes()


def _manual(axis_context: Any, run: Callable[..., Any], xs: Sequence[Any], avals_out: Sequence[Any]) -> Any:
    """run(*xs) with all mesh axes manual: axis_index and custom calls need that.

    Types have the sharding over explicit axes. Over automatic axes, operands are gathered.
    """
    if set(axis_context.manual_axes) == set(axis_context.mesh.axis_names):
        return run(*xs)
    in_specs = tuple(jax.typeof(x).sharding.spec for x in xs)
    out_specs = [a.sharding.spec for a in avals_out]
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*xs)


def _wait_for(xs: tuple[Any, ...], num_after: int) -> tuple[Any, ...]:
    """Operands that XLA's own collective waits for with the last `num_after` values, if XLA keeps the barrier."""
    return lax.optimization_barrier(xs)[: len(xs) - num_after] if num_after else xs


def lower_done(ctx: Any, *xs: Any, platform: str, algorithm: str | None) -> Any:
    """Lowers the end of a transfer to a custom call that does nothing. Its result is aliased to the first operand.

    XLA:CPU keeps memory apart only for values that a later computation uses. XLA:GPU waits for a transfer before the
    first use of its result: the custom call, which comes after the values that it names. An optimization barrier would
    not do: XLA drops its operands whose results are not used. XLA's own collectives on GPUs and other platforms run as
    XLA schedules them.
    """
    axis_context = ctx.module_context.axis_context
    by_xla = platform == "other" or (platform == "cuda" and selects_xla(algorithm, platform))
    if by_xla or not _compat.in_spmd_region(axis_context):
        return [xs[0]]
    if platform == "cpu":
        register()
    (aval,) = ctx.avals_out
    out_types = [jax.ShapeDtypeStruct(_local_shape(aval, axis_context.mesh), in_bytes(aval.dtype))]

    def finish(*xs):
        done = jax.ffi.ffi_call("jaxcomm_done", out_types, input_output_aliases={0: 0})
        return [done(*(x.astype(in_bytes(x.dtype)) for x in xs))[0].astype(aval.dtype)]

    def manual(*xs):
        return _manual(axis_context, finish, xs, ctx.avals_out)

    return _compat.mlir.lower_fun(manual, multiple_results=True)(ctx, *xs)


def lower(
    ctx: Any,
    *xs: Any,
    platform: str,
    call: Call,
    target: str,
    attributes: Callable[[Any, int], dict[str, Any]],
    alone: Callable[..., Any] | None,
    xla: Callable[..., Any],
    aliases: dict[int, int] | None = None,
    num_after: int = 0,
    own_stream: bool = False,
) -> Any:
    """Lowers one collective to one custom call per device, or to XLA's own collective.

    Args:
      ctx: lowering context; its avals have the shapes of operands and results.
      xs: operands.
      platform: "cpu", "cuda" or "other".
      call: arguments of the op.
      target: name of the FFI target.
      attributes: (first operand on one device, group size) -> attributes of the custom call that are specific to the
        collective.
      alone: the computation in a group of one rank, (x, shape) -> y; None calls the target there too. On GPUs, a call
        with `algorithm` calls the target in any case, so that a single GPU can test the handlers.
      xla: the same computation with collectives of jax.lax, (*xs) -> results.
      aliases: operands by index, and the results that they are aliased to.
      num_after: number of operands at the end that only delay the collective until they have been computed.
      own_stream: the target uses a second stream. It is never part of a CUDA graph, and uses no windows.
    """
    axis_context = ctx.module_context.axis_context
    if not _compat.in_spmd_region(axis_context):
        raise NotImplementedError(f"{call.op} at {call.site} is outside of jax.shard_map; call it under jax.shard_map")
    mesh = axis_context.mesh
    rows = replica_groups(mesh.axis_names, mesh.axis_sizes, call.axes, call.groups)
    group_size = rows.shape[1]
    by_xla = uses_xla(call, platform)
    exported = _compat.is_exported(ctx)
    common = {} if by_xla else _call_attributes(mesh, call, rows, target.removeprefix("jaxcomm_"), platform, exported)
    if own_stream:
        common.pop("symmetric_buffers", None)
    beside = platform == "cuda" and not by_xla and call.asynchronous
    if beside:  # ranks compare the order of their calls, also that of equal ones
        # Not by shapes or operands of after=: ranks do not compare them.
        common["call"]["number"] = np.int64(_compat.number_in_program(ctx, (call.op, call.site)))
    may_capture = not beside and _placement.gpus_are_on_one_host(mesh, rows)
    if platform == "cuda" and not by_xla and not own_stream and not may_capture:
        # Not for CUDA graphs: NCCL's messages between nodes must not be part of one, and XLA would run an asynchronous
        # call in one after the computations beside it.
        target += "_eager"
    out_types = [jax.ShapeDtypeStruct(_local_shape(a, mesh), in_bytes(a.dtype)) for a in ctx.avals_out]

    def exchange(*xs):
        # The rank is the position in the mesh, not the device id: this holds for permuted and exported meshes too.
        rank = jnp.int32(0)
        for name, size in () if beside else zip(mesh.axis_names, mesh.axis_sizes, strict=True):
            rank = rank * size + lax.axis_index(name).astype(jnp.int32)
        # The side effect keeps XLA from merging or dropping calls on some devices only. It is added in the lowering:
        # jax.checkpoint rejects primitives with effects in 0.10.
        whole = [x.astype(in_bytes(x.dtype)) for x in xs]
        in_place = {operand + 1: result for operand, result in aliases.items()} if aliases else None
        ffi_call = jax.ffi.ffi_call(target, out_types, has_side_effect=True, input_output_aliases=in_place)

        def run(rank, *whole):
            return ffi_call(rank, *whole, **common, **attributes(whole[0], group_size))

        def run_alone(*whole):
            # GPUs ignore the rank. As an operand of the function, it would delay the start: XLA may compute it late.
            return run(jnp.int32(0), *whole)

        # No peer reads the operands of a barrier.
        symmetric = "symmetric_buffers" in common and aliases is None
        with _compat.in_collective_memory(operands=[1], results=[0]) if symmetric else contextlib.nullcontext():
            ys = _compat.on_communication_stream(run_alone, *whole) if beside else run(rank, *whole)
        return [y.astype(a.dtype) for y, a in zip(ys, ctx.avals_out, strict=True)]

    def exchange_by_xla(*xs):
        xs = _wait_for(xs, num_after)
        if not any(math.prod(out.shape) for out in out_types):  # XLA rejects some empty collectives
            return [jnp.zeros(out.shape, a.dtype) for out, a in zip(out_types, ctx.avals_out, strict=True)]
        ys = xla(*(x.astype(in_bytes(x.dtype)) for x in xs))
        return [y.astype(a.dtype) for y, a in zip(ys, ctx.avals_out, strict=True)]

    def manual(*xs):
        run = exchange_by_xla if by_xla else exchange
        if group_size == 1 and alone is not None and not (platform == "cuda" and call.algorithm):
            own = xs[: len(xs) - num_after]
            return [alone(x, a.shape) for x, a in zip(own, ctx.avals_out, strict=True)]
        return _manual(axis_context, run, xs, ctx.avals_out)

    return _compat.mlir.lower_fun(manual, multiple_results=True)(ctx, *xs)
