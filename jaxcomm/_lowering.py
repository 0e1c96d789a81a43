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

from jaxcomm import _compat, _cost_params, _request, _selftest_record, _xla_hierarchical
from jaxcomm._config import config
from jaxcomm._core import plan
from jaxcomm._dtypes import in_bytes
from jaxcomm._native import register
from jaxcomm._processes import bootstrap, liveness
from jaxcomm._processes import placement as placements
from jaxcomm._typing import AnyMesh, AxisNames, Groups
from jaxcomm.recorder import _start as recorder


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


class Site:
    """A call that is being lowered: where its ranks are, and what runs it. Each is computed once.

    Attributes:
      call: arguments of the op.
      platform: "cpu", "cuda" or "other".
      exported: whether other devices than those of the mesh may run the program.
      mesh: mesh of the program.
      rows: replica groups, (groups, group size).
    """

    def __init__(self, ctx: Any, call: Call, platform: str):
        axis_context = ctx.module_context.axis_context
        if not _compat.in_spmd_region(axis_context):
            raise NotImplementedError(
                f"{call.op} at {call.site} is outside of jax.shard_map; call it under jax.shard_map"
            )
        self._ctx, self.call, self.platform, self.exported = ctx, call, platform, _compat.is_exported(ctx)
        self.mesh = axis_context.mesh
        self.rows = replica_groups(self.mesh.axis_names, self.mesh.axis_sizes, call.axes, call.groups)

    @property
    def group_size(self) -> int:
        return int(self.rows.shape[1])

    def number_in_program(self) -> int:
        """The number of this call among those of the program with its op and call site."""
        return _compat.number_in_program(self._ctx, (self.call.op, self.call.site))

    @functools.cached_property
    def declared_per_node(self) -> int:
        """Ranks per node by the axes of the call."""
        sizes = tuple(self.mesh.axis_sizes[self.mesh.axis_names.index(a)] for a in self.call.axes)
        return ranks_per_node(sizes, self.call.groups)

    @functools.cached_property
    def on_one_host(self) -> bool:
        """Whether NVLink may connect all GPUs of each group."""
        return placements.gpus_are_on_one_host(self.mesh, self.rows)

    @functools.cached_property
    def _cpus(self) -> placements.GroupPlacement:
        """The placement on CPUs. Connects this process to the processes of its groups."""
        return placements.of_groups(self.mesh, self.rows)

    @functools.cached_property
    def placement(self) -> plan.Placement:
        if self.platform == "cpu":
            processes = self._cpus.processes.reshape(-1, self.group_size)
            scope = "network" if self._cpus.ranks_per_node else "node"
            if all(len(set(row)) == 1 for row in processes):
                scope = "process"
            return plan.Placement(scope, self._cpus.ranks_per_node or self.declared_per_node)
        if self.platform == "cuda":  # NCCL finds the nodes at run time
            return plan.Placement(ranks_per_node=placements.gpus_per_host(self.mesh, self.rows), found=False)
        return plan.Placement(ranks_per_node=self.declared_per_node)

    @functools.cached_property
    def levels(self) -> _xla_hierarchical.Levels | None:
        """Node groups and rail groups; None if the group has one node, or one rank per node."""
        found = placements.ranks_per_node_for_xla(self.mesh, self.rows, self.platform)
        per_node = found or self.declared_per_node
        if per_node in (1, self.group_size):
            return None
        call = self.call
        num_ranks = math.prod(self.mesh.axis_sizes[self.mesh.axis_names.index(a)] for a in call.axes)
        return _xla_hierarchical.Levels.of(call.axes, num_ranks, call.groups, per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node: of the processes on CPUs, else as the axes declare."""
        return int(self.placement.ranks_per_node) if self.platform == "cpu" else self.declared_per_node

    @functools.cached_property
    def windows(self) -> bool:
        """Whether peers access operands and results where XLA has them. Starts have none (docs/internals/cuda.md)."""
        return self.platform == "cuda" and not self.call.asynchronous and bootstrap.no_windows(self.mesh) is None

    @functools.cached_property
    def why_xla(self) -> str:
        """Why XLA's own collectives run the call, wherever its ranks are; empty if they do not."""
        return why_xla(self.platform, self.call.algorithm)

    def attributes(self, algorithm: str | None) -> dict[str, Any]:
        """Attributes of every custom call. Arrays must be at the top level; `call` has the others."""
        call = self.call
        own: dict[str, Any] = {}
        if self.platform == "cuda":
            processes = None if self.exported else placements.gpu_processes(self.mesh, self.rows)
            if processes is not None:  # else the GPUs of a process do not meet before the first run
                own["processes"] = processes
            if self.windows:
                own["symmetric_buffers"] = np.int64(1)
        else:
            own["processes"] = self._cpus.processes
            if self._cpus.devices.size and not self.exported:
                own["devices"] = self._cpus.devices
        scalars = {
            "op": call.op,
            "site": call.site,
            "algorithm": algorithm or "",
            "group_size": np.int64(self.group_size),
            "ranks_per_node": np.int64(self.placement.ranks_per_node if self.platform == "cpu" else self.group_size),
            "max_sms": np.int64(call.max_sms or 0),
        }
        if call.asynchronous:
            scalars["asynchronous"] = np.int64(1)
        return {"call": scalars, "groups": self.rows.reshape(-1).astype(np.int64), **own}

    def connect(self) -> None:
        """Registers the targets and connects the processes of the groups."""
        bootstrap.warn_if_alone()
        try:
            recorder.start()
            if self.platform == "cuda":
                liveness.register_cuda()
            else:
                register()
                _cost_params.load()
                self._cpus  # noqa: B018
        except (ImportError, RuntimeError) as error:  # logs may lack the traceback, so the text names the call
            raise RuntimeError(f"jaxcomm: {self.call.op} at {self.call.site}: while compiling, {error}") from error

    def resolve(self, collective: str, given: dict[str, Any], dtype: Any, sizes: tuple[int, int], **rows: int) -> Any:
        """What runs a collective of this call: a plan.Resolution.

        Args:
          collective: native name.
          given: attributes of the custom call that are specific to the collective.
          dtype: element type of the operand.
          sizes: elements of the first operand and of the result on one device.
          rows: `choices` of plan.resolve.

        Raises:
          ValueError: the algorithm or the sizes do not fit (when tracing).
          NotImplementedError: the platform does not have the algorithm (when tracing).
        """
        call = self.call
        if self.platform != "other" and not self.why_xla:
            self.connect()
        placement = plan.Placement() if self.why_xla else self.placement
        between = self.platform == "cuda" and call.algorithm in (None, "hierarchical") and not self.on_one_host
        machine = None
        if self.platform == "cpu" and not self.why_xla:
            machine = plan.machine_of(placement.scope, self.group_size, placement.ranks_per_node)
        able = capabilities(
            self.platform,
            call.algorithm,
            tested_between_nodes=between and not self.why_xla and _selftest_record.passed_between_nodes(collective),
            in_place=not self.why_xla and self.windows,
            machine=machine,
        )
        spec = {
            "algorithm": call.algorithm or "",
            "group_size": self.group_size,
            "ranks_per_node": self.declared_per_node if self.why_xla else self.ranks_per_node,
            "max_sms": call.max_sms or 0,
            "asynchronous": int(call.asynchronous),
            **given,
        }
        try:
            name = str(jnp.dtype(in_bytes(dtype)))
            resolution = plan.resolve(collective, spec, name, *sizes, placement, able, **rows)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{call.op} at {call.site}: {error}") from None
        listed = _request.add_to_list(call, resolution)
        if not listed and resolution.backend == "xla" and call.algorithm is None and config().algorithm != "xla":
            _log(self.platform, resolution.reason)
        return resolution


def why_xla(platform: str, algorithm: str | None) -> str:
    """Why XLA's own collectives run all calls with this argument `algorithm`; empty if they do not."""
    return str(plan.why_xla(algorithm or "", capabilities(platform, algorithm)))


def by_record(platform: str, algorithm: str | None) -> bool:
    """Whether the record of the self-test decides what runs calls with this argument `algorithm`."""
    return platform == "cuda" and not (algorithm or _use_plans or config().algorithm)


def capabilities(platform: str, algorithm: str | None, **more: Any) -> plan.Capabilities:
    """What this platform can do: settings and records. `algorithm`: argument of the call; `more`: further fields."""
    setting = "plans" if _use_plans and config().algorithm is None else config().algorithm or ""
    recorded = by_record(platform, algorithm)
    return plan.Capabilities(
        platform,
        setting,
        measured=_selftest_record.measured() if recorded else [],
        passed=_selftest_record.passed() if recorded else [],
        measured_one_exchange=recorded and _selftest_record.measured_one_exchange(),
        multimem=platform == "cuda",
        max_channels=config().max_sms,
        **more,
    )


def _local_shape(aval: Any, mesh: AnyMesh) -> tuple[int, ...]:
    """Shape on one device. Types have the global shape over explicit mesh axes that are not manual."""
    shape = list(aval.shape)
    for dimension, names in enumerate(aval.sharding.spec):
        for name in names if isinstance(names, tuple) else (names,) if names is not None else ():
            shape[dimension] //= mesh.axis_sizes[mesh.axis_names.index(name)]
    return tuple(shape)


def register_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers a lowering rule with the keyword `platform`: "cpu", "cuda" or "other" (no handlers)."""
    for platform in ("cpu", "cuda"):
        _compat.mlir.register_lowering(primitive, functools.partial(rule, platform=platform), platform=platform)
    _compat.mlir.register_lowering(primitive, functools.partial(rule, platform="other"))


@functools.cache
def _log(platform: str, reason: str) -> None:
    remedy = ""
    if platform == "cuda":
        remedy = ": run `python -m jaxcomm.selftest` with the launcher of the program, or set JAXCOMM_ALGORITHM=plans"
    logging.getLogger("jaxcomm").warning("jaxcomm uses XLA's own collectives, because %s%s", reason, remedy)


_use_plans = False


def use_plans() -> None:
    """Programs that are compiled from now on use jaxcomm's own collectives on GPUs, as with JAXCOMM_ALGORITHM=plans."""
    global _use_plans
    _use_plans = True


def _manual(axis_context: Any, run: Callable[..., Any], xs: Sequence[Any], avals_out: Sequence[Any]) -> Any:
    """run(*xs) with all mesh axes manual: axis_index and custom calls need that.

    Types have the sharding over explicit axes. Over automatic axes, operands are gathered.
    """
    if set(axis_context.manual_axes) == set(axis_context.mesh.axis_names):
        return run(*xs)
    in_specs = tuple(jax.typeof(x).sharding.spec for x in xs)
    out_specs = [a.sharding.spec for a in avals_out]
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*xs)


def lower_done(ctx: Any, *xs: Any, platform: str, call: Call) -> Any:
    """Lowers the end of a transfer to a custom call that does nothing. Its result is aliased to the first operand.

    XLA:CPU keeps memory apart only for values that a later computation uses. XLA:GPU waits for a transfer before the
    first use of its result: the custom call, which comes after the values that it names. An optimization barrier would
    not do: XLA drops its operands whose results are not used. XLA's own collectives run as XLA schedules them.
    """
    axis_context = ctx.module_context.axis_context
    if not _compat.in_spmd_region(axis_context):
        return [xs[0]]
    site = Site(ctx, call, platform)
    if site.group_size == 1:  # nothing was transferred
        return [xs[0]]
    # Neither peers nor sizes decide what runs a started call.
    no_boxes = [0, 0] * site.group_size
    no_peers = {"source_of": [-1] * site.group_size, "sources": no_boxes, "destinations": no_boxes}
    if site.resolve(_request.FUNCTIONS[call.op], no_peers, ctx.avals_out[0].dtype, (0, 0)).backend != "plan":
        return [xs[0]]
    (aval,) = ctx.avals_out
    out_types = [jax.ShapeDtypeStruct(_local_shape(aval, axis_context.mesh), in_bytes(aval.dtype))]

    def finish(*xs):
        done = jax.ffi.ffi_call("jaxcomm_done", out_types, input_output_aliases={0: 0})
        return [done(*(x.astype(in_bytes(x.dtype)) for x in xs))[0].astype(aval.dtype)]

    def manual(*xs):
        return _manual(axis_context, finish, xs, ctx.avals_out)

    return _compat.lower_named(manual, call.op.replace("_start", "_done"), ctx, *xs)


def lower_manual(ctx: Any, *xs: Any, call: Call, run: Callable[..., Any]) -> Any:
    """Lowers run(*xs), which sees the operands of one device and may call custom_call() and collectives of jax.lax.

    Args:
      ctx: lowering context; its avals have the shapes of operands and results.
      xs: operands.
      call: arguments of the op.
      run: (*operands) -> results.
    """
    axis_context = ctx.module_context.axis_context
    if not _compat.in_spmd_region(axis_context):
        raise NotImplementedError(f"{call.op} at {call.site} is outside of jax.shard_map; call it under jax.shard_map")

    def manual(*xs):
        return _manual(axis_context, run, xs, ctx.avals_out)

    return _compat.lower_named(manual, call.op, ctx, *xs)


def custom_call(
    site: Site, target: str, *, algorithm: str | None = None, aliases: dict[int, int] | None = None
) -> Callable[..., list[Any]]:
    """Prepares one custom call per device.

    Args:
      site: the call, on "cpu" or "cuda".
      target: name of the FFI target.
      algorithm: algorithm of the custom call; None leaves the choice to the run.
      aliases: operands by index, and the results that they are aliased to.

    Returns:
      (operands, types of the results, attributes) -> results, for functions that run under lower_manual(). The
      attributes are those that are specific to the target. The types have the shapes on one device.
    """
    mesh = site.mesh
    site.connect()
    common = site.attributes(algorithm)
    beside = site.platform == "cuda" and site.call.asynchronous
    if beside:  # ranks compare the order of their calls, also that of equal ones
        # Shapes and operands of after= do not count, because ranks do not compare them.
        common["call"]["number"] = np.int64(site.number_in_program())
    untested = by_record(site.platform, site.call.algorithm) and not _selftest_record.passed_in_graphs()
    if site.platform == "cuda" and (beside or not site.on_one_host or untested):
        target += "_eager"  # not in CUDA graphs, where XLA runs started calls after the computations beside them

    def run(xs: Sequence[Any], types: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
        # The rank is the position in the mesh, not the device id: this holds for permuted and exported meshes too.
        rank = jnp.int32(0)
        for name, size in () if beside else zip(mesh.axis_names, mesh.axis_sizes, strict=True):
            rank = rank * size + lax.axis_index(name).astype(jnp.int32)
        # The side effect keeps XLA from merging or dropping calls on some devices only. It is added in the lowering:
        # jax.checkpoint rejects primitives with effects in 0.10.
        operands = [x.astype(in_bytes(x.dtype)) for x in xs]
        out_types = [jax.ShapeDtypeStruct(t.shape, in_bytes(t.dtype)) for t in types]
        in_place = {operand + 1: result for operand, result in aliases.items()} if aliases else None
        ffi_call = jax.ffi.ffi_call(target, out_types, has_side_effect=True, input_output_aliases=in_place)

        def on_device(rank, *operands):
            return ffi_call(rank, *operands, **common, **attributes)

        def without_rank(*operands):
            # GPUs ignore the rank. As an operand of the function, it would delay the start: XLA may compute it late.
            return on_device(jnp.int32(0), *operands)

        # No peer reads the operands of a barrier.
        symmetric = "symmetric_buffers" in common and aliases is None
        with _compat.in_collective_memory(operands=[1], results=[0]) if symmetric else contextlib.nullcontext():
            ys = _compat.on_communication_stream(without_rank, *operands) if beside else on_device(rank, *operands)
        return [y.astype(t.dtype) for y, t in zip(ys, types, strict=True)]

    return run


def lower(
    ctx: Any,
    *xs: Any,
    platform: str,
    call: Call,
    target: str,
    attributes: Callable[[Any, int], dict[str, Any]],
    alone: Callable[..., Any] | None,
    xla: Callable[..., Any],
    composed: Callable[..., Any] | None = None,
    aliases: dict[int, int] | None = None,
    num_after: int = 0,
    onto_zeros: bool = False,
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
      composed: the same by _xla_hierarchical, (*xs, levels) -> results.
      aliases: operands by index, and the results that they are aliased to.
      num_after: number of operands at the end that only delay the collective until they have been computed.
      onto_zeros: whether the target writes some elements of its result only; the others are zero.
    """
    site = Site(ctx, call, platform)
    mesh, group_size = site.mesh, site.group_size
    types = [jax.ShapeDtypeStruct(_local_shape(a, mesh), a.dtype) for a in ctx.avals_out]
    first = ctx.avals_in[0]
    operand = jax.ShapeDtypeStruct(_local_shape(first, mesh), in_bytes(first.dtype))
    given = attributes(operand, group_size)
    sizes = (math.prod(operand.shape), math.prod(types[0].shape))
    resolution = site.resolve(target.removeprefix("jaxcomm_"), given, operand.dtype, sizes)
    own = None
    if resolution.backend in ("plan", "rows"):
        # The run selects a plan again, because NCCL finds the nodes, but not another plan than the record has.
        decided = resolution.backend == "rows" or by_record(platform, call.algorithm)
        algorithm = resolution.algorithm if decided else call.algorithm
        own = custom_call(site, target, algorithm=algorithm, aliases={1: 0} if onto_zeros else aliases)
    elif resolution.backend == "composition" and composed is not None and (levels := site.levels) is not None:
        xla = functools.partial(composed, levels=levels)

    def exchange(*xs):
        if own is not None:
            zeros = [jnp.zeros(types[0].shape, types[0].dtype)] if onto_zeros else []
            return own([xs[0], *zeros, *xs[1:]], types, given)
        if num_after:  # XLA's own collective waits for the values, if XLA keeps the barrier
            xs = lax.optimization_barrier(xs)[: len(xs) - num_after]
        if not any(math.prod(t.shape) for t in types):  # XLA rejects some empty collectives
            return [jnp.zeros(t.shape, t.dtype) for t in types]
        ys = xla(*(x.astype(in_bytes(x.dtype)) for x in xs))
        return [y.astype(t.dtype) for y, t in zip(ys, types, strict=True)]

    def manual(*xs):
        if group_size == 1 and alone is not None and not (platform == "cuda" and call.algorithm):
            operands = xs[: len(xs) - num_after]
            return [alone(x, a.shape) for x, a in zip(operands, ctx.avals_out, strict=True)]
        return _manual(ctx.module_context.axis_context, exchange, xs, ctx.avals_out)

    return _compat.lower_named(manual, call.op, ctx, *xs)
