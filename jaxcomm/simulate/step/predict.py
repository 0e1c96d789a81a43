"""step(): the time of a training or inference step on a cluster, from its jaxpr."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.step.costs import MAX_STEPS, Costs
from jaxcomm.simulate.step.jaxpr import Reader
from jaxcomm.simulate.step.memory import peak_bytes
from jaxcomm.simulate.step.result import Collective, Step
from jaxcomm.simulate.step.schedule import Timeline, execute
from jaxcomm.simulate.step.tasks import Block, Exchange, Kernel, StepError


def axes_of(mesh: Any) -> dict[str, int]:
    sizes = dict(mesh) if isinstance(mesh, dict) else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise StepError(f"step: mesh: expected names of axes with positive sizes, got {sizes}")
    return sizes


def _trace(step_fn: Callable[..., Any], args: Sequence[Any], given: Any, reader: Reader) -> tuple[Block, float]:
    """The tasks of a device, and the bytes that it holds at once."""
    mesh = axes_of(given)
    if isinstance(given, dict):
        given = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    try:
        with jax.sharding.use_abstract_mesh(getattr(given, "abstract_mesh", given)):
            jaxpr = jax.make_jaxpr(step_fn)(*args)
    except (NameError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "context mesh" in str(error):
            lines = lines[:1]
        elif not any(part in str(error) for part in ("unbound axis name", "is not bound here", "specs refers to")):
            raise
        axes = ",".join(f"{name}={size}" for name, size in mesh.items())
        raise StepError(f"step: mesh {axes}: {' '.join(lines)}") from None
    block = reader.block(jaxpr)
    for found, site in reader.meshes:
        if found != mesh:
            raise StepError(f"step: the shard_map at {site} has the mesh {found}, but the simulation has {mesh}")
    if not any(True for _ in block.exchanges()):
        raise StepError(
            "step: the program has no collective. XLA inserts collectives of automatic sharding when it compiles; "
            "write the step with jax.shard_map"
        )
    return block, peak_bytes(jaxpr)


def _table(timeline: Timeline, costs: Costs) -> tuple[Collective, ...]:
    rows: dict[Exchange, Collective] = {}
    for run, times in timeline.leaves():
        work = run.task.work
        found = costs.simulated(work) if isinstance(work, Exchange) else None
        if found is None or not isinstance(work, Exchange):
            continue
        before = rows.get(work)
        count, exposed_s = times + (before.count if before else 0), times * run.exposed_s
        exposed_s += before.exposed_s if before else 0.0
        rows[work] = Collective(
            work.site, work.op, work.axes, found.ranks, found.bytes, count, found.time_s or 0.0, exposed_s, found
        )
    return tuple(sorted(rows.values(), key=lambda c: (-c.exposed_s, -c.total_s)))


def _why(timeline: Timeline, collectives: tuple[Collective, ...], costs: Costs) -> str:
    if 2 * timeline.exposed_s >= timeline.time_s and collectives:
        worst = collectives[0]
        share = timeline.exposed_s / (timeline.time_s or 1)
        return (
            f"communication without computation, {share:.0%} of the time; most of it in "
            f"{worst.op} over {', '.join(worst.axes)} at {worst.site} ({worst.simulated.why})"
        )
    shares = {"operations of products": 0.0, "bytes of memory": 0.0, "starts of kernels": 0.0}
    for run, times in timeline.leaves():
        work = run.task.work
        if isinstance(work, Kernel):
            flops_s, bytes_s = costs.roofline(work)
            limit = "bytes of memory" if bytes_s >= flops_s else "operations of products"
            shares[limit] += times * max(flops_s, bytes_s)
            shares["starts of kernels"] += times * costs.compute.kernel_s
    largest = max(shares, key=lambda name: shares[name])
    return f"computation, {timeline.compute_s / (timeline.time_s or 1):.0%} of the time; most of it for {largest}"


def step(
    step_fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Any,
    cluster: Cluster,
    while_trips: int = 1,
    symmetric_buffers: bool = False,
) -> Step:
    """Predicts the time of a step on a cluster, from its jaxpr. No device is needed.

    Kernels take the larger of the times for their operations and their bytes; elementwise operations between two
    products are one kernel. Collectives take the time of ``collective`` while all groups of the mesh communicate.
    Those that XLA executes overlap with computation: collectives of ``jax.lax``, and jaxcomm's without an algorithm,
    because XLA's are the default on GPUs. A synchronous call of jaxcomm with an algorithm blocks computation.

    Ranks are row-major positions in the mesh: ranks along its last axis are neighbours on the cluster, so the order of
    the axes decides which collectives stay inside a domain.

    Args:
      step_fn: a function with ``jax.shard_map`` inside, jitted or not.
      args: its arguments: arrays, or pytrees of jax.ShapeDtypeStruct.
      mesh: the mesh of the shard_map, an AbstractMesh, or a dict of sizes by axis.
      cluster: the cluster; its file has ``device.flops_bf16``.
      while_trips: iterations of a while loop, which a jaxpr does not know.
      symmetric_buffers: as in ``collective``.

    With faults, each collective takes the time of its slowest group. Each kernel takes the time of the slowest rank.

    Raises:
      StepError: a program without collectives or with ones that are not modelled, or with another mesh.
      ClusterError: a cluster that is too small, or groups that do not fit its levels.
    """
    if while_trips < 1:
        raise StepError(f"step: while_trips must be at least 1, got {while_trips}")
    reader = Reader(while_trips)
    block, memory_bytes = _trace(step_fn, args, mesh, reader)
    costs = Costs(cluster, axes_of(mesh), symmetric_buffers)
    return of_block(block, costs, reader.notes, memory_bytes)


def of_block(block: Block, costs: Costs, notes: dict[str, int], memory_bytes: float | None = None) -> Step:
    """As ``step``, for tasks that every rank of the mesh executes. ``notes``: assumptions, with their places."""
    timeline = execute(block, costs.duration)
    low, high = (execute(block, costs.end(end)).time_s for end in (False, True))
    notes = dict(notes)

    def note(text: str, count: int = 1) -> None:
        notes[text] = notes.get(text, 0) + count

    collectives = _table(timeline, costs)
    modelled = sum(c.simulated.steps == 0 and not c.simulated.utilisation for c in collectives)
    if modelled:
        note(f"collectives of more than {MAX_STEPS} steps take the time of the cost model", modelled)
    for text, count in costs.assumed(collectives):
        note(text, count)
    kinds = [o.split(":")[0] for o in {**costs.cluster.origins, **costs.compute.origins}.values()]
    kernels = [(run.task.work, times) for run, times in timeline.leaves() if isinstance(run.task.work, Kernel)]
    return Step(
        cluster=costs.cluster.name,
        mesh=costs.mesh,
        time_s=timeline.time_s,
        interval=(min(low, timeline.time_s), max(high, timeline.time_s)),
        least_s=timeline.least_s,
        serial_s=timeline.serial_s,
        compute_s=timeline.compute_s,
        communication_s=timeline.communication_s,
        exposed_s=timeline.exposed_s,
        memory_bytes=memory_bytes,
        capacity_bytes=capacity if math.isfinite(capacity := costs.cluster.memory_bytes) else None,
        flops=sum(work.flops * times for work, times in kernels),
        bytes=sum(work.bytes * times for work, times in kernels),
        collectives=collectives,
        why=_why(timeline, collectives, costs),
        notes=(*costs.acting, *costs.idle(), *(f"{text} ({count} place(s))" for text, count in notes.items())),
        origins={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        timeline=timeline,
    )
