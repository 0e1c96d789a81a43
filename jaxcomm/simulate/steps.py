"""step(): the time of a training or inference step on a cluster, from its jaxpr."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm.simulate import calls, faults, groups
from jaxcomm.simulate import skew as skews
from jaxcomm.simulate.cluster import Cluster, ClusterError
from jaxcomm.simulate.predictions import Collective, Step
from jaxcomm.simulate.program import Reader
from jaxcomm.simulate.schedule import Duration, Timeline, execute
from jaxcomm.simulate.skew import Skew
from jaxcomm.simulate.tasks import Block, Exchange, Kernel, StepError

# Of one collective; beyond, the cost model gives its time.
_MAX_STEPS = 300_000
# Of one group with faults; beyond, a smaller group gives the slowdown.
_MAX_BROKEN_STEPS = 1_000_000
# Of that smaller group, at most.
_SMALL_RANKS = 256
# Kernels take at least the time of the data sheet's peaks, and at most twice the estimate: a guess.
_SLOWEST_KERNEL = 2.0


class Costs:
    """Times of kernels and collectives. Equal collectives are simulated once."""

    def __init__(
        self,
        cluster: Cluster,
        mesh: dict[str, int],
        fidelity: str = "folded",
        skew: Skew | None = None,
        seed: int = 0,
        symmetric_buffers: bool = False,
    ):
        if fidelity not in ("folded", "full"):
            raise StepError(f"step: fidelity must be folded or full, got {fidelity!r}")
        if cluster.compute is None:
            raise ClusterError(f"{cluster.name}: device.flops_bf16: is missing; step needs it")
        self.compute, self.mesh, self.fidelity = cluster.compute, mesh, fidelity
        self.skew, self.seed, self.symmetric_buffers = skew, seed, symmetric_buffers
        n = math.prod(mesh.values())
        if skew is not None and skew.kind == "list" and len(skew.arrivals_s) != n:
            raise StepError(f"step: skew has {len(skew.arrivals_s)} arrivals, expected one for each of {n} ranks")
        if n > cluster.ranks:
            raise ClusterError(f"{cluster.name}: the mesh has {n} ranks, but the cluster has {cluster.ranks}")
        self.notes: dict[str, int] = {}
        groups.check_faults(cluster)
        self.whole = dataclasses.replace(cluster, faults=()).spread(n)
        broken, given = self._survive(cluster, n)
        names = [level.name for level in self.whole.levels]
        used = [not fault.planes and (not fault.level or fault.level in names) for fault in broken]
        self.acting = [str(fault) for fault in cluster.faults if fault.slow == 0 and fault.index < n]
        self.acting += [str(fault) for fault in cluster.faults if fault.planes and fault.level in names]
        self.texts = [str(fault) for fault, kept in zip(given, used, strict=True) if kept]
        broken = tuple(fault for fault, kept in zip(broken, used, strict=True) if kept)
        self.broken = dataclasses.replace(self.whole, faults=broken)
        self.places = [groups.place(self.broken, fault) for fault in broken]
        self.slow = max([fault.slow for fault in broken], default=1.0)
        self.acting += [text for text, fault in zip(self.texts, broken, strict=True) if not fault.level]
        if self.slow > 1:
            self.acting.append("each kernel takes the time of the slowest rank")
        if any(fault.slow == 0 for fault in cluster.faults):
            self.acting.append("other ranks of the cluster replace the lost ones")
        self.found: dict[Exchange, calls.Simulated | None] = {}
        self.classes: dict[tuple[Any, ...], calls.Simulated] = {}
        self.views: dict[tuple[Any, ...], list[tuple[np.ndarray, Cluster]]] = {}

    def _survive(self, cluster: Cluster, n: int) -> tuple[tuple[faults.Fault, ...], tuple[faults.Fault, ...]]:
        """The faults after ranks of the cluster that the mesh does not use have replaced the lost ones.

        Returns:
          the faults in the new numbers, and the same ones as given.
        """
        size = (cluster.ranks, cluster.levels[0].ranks)
        try:
            left, broken = faults.survive(cluster.faults, *size)
        except ValueError as error:
            raise ClusterError(f"{cluster.name}: {error}") from None
        if left < n:
            raise ClusterError(f"{cluster.name}: the mesh has {n} ranks, but {left} are left; use a smaller mesh")
        lost = [fault for fault in cluster.faults if fault.slow == 0]
        return broken, tuple(f for f in cluster.faults if f.slow and faults.survive((*lost, f), *size)[1])

    def kernel(self, work: Kernel, ideal: bool = False) -> float:
        """Roofline: the larger of the times for operations and bytes."""
        if work.time_s is not None:
            return self.slow * work.time_s
        of, dtype = self.compute, work.dtype or "bfloat16"
        peak = of.flops_per_s * 2 / max(jax.numpy.dtype(dtype).itemsize, 1)
        shares = (1.0, 1.0) if ideal else (of.efficiency, of.memory_efficiency)
        time_s = max(work.flops / (peak * shares[0]), work.bytes / (self.whole.memory_bytes_per_s * shares[1]))
        return self.slow * (time_s if ideal else time_s + of.kernel_s)

    def simulated(self, work: Exchange) -> calls.Simulated | None:
        """None for a group of one rank, which transfers nothing."""
        key = dataclasses.replace(work, site="", asynchronous=False)
        if key not in self.found:
            self.found[key] = self._simulate(work)
        return self.found[key]

    def exchange(self, work: Exchange) -> float:
        found = self.simulated(work)
        return found.time_s or 0.0 if found else 0.0

    def _seen(self, work: Exchange, what: str) -> list[tuple[np.ndarray, Cluster]]:
        """The first group, those with faults and the one with the last arrival, and the cluster that each sees."""
        rows = groups.members(self.mesh, work.axes, work.groups, what)
        group_of = np.full(rows.max() + 1, -1)
        group_of[rows] = np.arange(len(rows))[:, None]
        wanted = {0}
        skew = self.skew
        ranks = [*self.places, *([np.array([np.argmax(skew.arrivals_s)])] if skew and skew.arrivals_s else [])]
        for some in ranks:
            wanted |= {int(group) for group in group_of[some[some < len(group_of)]] if group >= 0}
        found = []
        for row in rows[sorted(wanted)]:
            cluster = groups.view(self.whole, row, what)
            if len(row) > 1:
                self._act(row, cluster)
            broken = groups.broken(self.broken, cluster, row)
            found.append((row, dataclasses.replace(cluster, faults=broken)))
        return found

    def _act(self, row: np.ndarray, seen: Cluster) -> None:
        """Notes the faulty links that a group uses."""
        names = [level.name for level in self.whole.levels]
        sizes = [1, *(level.ranks for level in seen.levels)]
        for fault, place, text in zip(self.broken.faults, self.places, self.texts, strict=True):
            number = names.index(fault.level) if fault.level else 0
            acts = fault.level and number < len(seen.levels) and sizes[number + 1] > sizes[number]
            if acts and text not in self.acting and np.isin(row, place).any():
                self.acting.append(text)

    def _simulate(self, work: Exchange) -> calls.Simulated | None:
        """The time of the slowest group."""
        what = f"{work.op} at {work.site} over {', '.join(work.axes)}"
        where = (work.axes, work.groups)
        if where not in self.views:
            self.views[where] = self._seen(work, what)
        seen = self.views[where]
        if len(seen[0][0]) == 1:
            return None
        found = [self._of_group(work, ranks, cluster, what) for ranks, cluster in seen]
        return max(found, key=lambda one: one.time_s or 0.0)

    def _of_group(self, work: Exchange, ranks: np.ndarray, cluster: Cluster, what: str) -> calls.Simulated:
        n = len(ranks)
        place = np.argsort(np.argsort(ranks))  # of each member in ascending order
        perm = None if work.perm is None else tuple((int(place[s]), int(place[d])) for s, d in work.perm)
        count = work.count
        if work.op in ("all_to_all", "psum_scatter", "ragged_all_to_all"):
            count = -(-count // n) * n
        op = "all_to_all" if work.op == "ragged_all_to_all" else work.op  # rows are spread evenly
        algorithm = None if op != work.op else work.algorithm
        dtype = jax.numpy.dtype(work.dtype)
        source = int(place[work.source])
        skew = self.skew
        if skew is not None and skew.kind == "list":
            skew = dataclasses.replace(skew, arrivals_s=tuple(skew.arrivals_s[rank] for rank in np.sort(ranks)))
        bytes_of = (count * dtype.itemsize, dtype.itemsize)
        key = (op, bytes_of, cluster.levels, cluster.faults, algorithm, work.max_sms, perm, source, skew)

        def simulate(seen: Cluster, ranks: int, algorithm: str | None, source: int, skew: Any) -> calls.Simulated:
            limit = _MAX_BROKEN_STEPS if seen.faults else _MAX_STEPS
            return calls.collective(
                op,
                jax.ShapeDtypeStruct((_count(op, count, n, ranks),), dtype),
                ranks,
                cluster=seen,
                algorithm=algorithm,
                source=source,
                perm=perm,
                max_sms=work.max_sms,
                fidelity=self.fidelity,
                max_steps=limit if self.fidelity == "folded" or seen.faults else None,
                skew=skew,
                seed=self.seed,
                symmetric_buffers=self.symmetric_buffers,
            )

        if key not in self.classes:
            try:
                try:
                    self.classes[key] = simulate(cluster, n, algorithm, source, skew)
                except calls.TooManySteps:
                    if perm is not None:
                        raise
                    self.classes[key] = self._estimate(simulate, cluster, n, algorithm, source, skew)
            except ValueError as error:
                raise StepError(f"step: {what}: {error}") from None
        return self.classes[key]

    def _estimate(
        self,
        simulate: Callable[[Cluster, int, str | None, int, Any], calls.Simulated],
        seen: Cluster,
        n: int,
        algorithm: str | None,
        source: int,
        skew: Any,
    ) -> calls.Simulated:
        """The time without faults, times the slowdown of a smaller group of the same levels with the same plan."""
        healthy = simulate(dataclasses.replace(seen, faults=()), n, algorithm, source, skew)
        most = min(_SMALL_RANKS, n - 1)
        while True:
            made = groups.smaller(seen, most, source)
            if made is None:
                raise calls.TooManySteps(
                    f"{healthy.op}: the faults leave few ranks of equal role among {n}, and no smaller group has the "
                    "same levels; use smaller groups"
                )
            small, root = made
            ranks = small.levels[-1].ranks
            try:
                broken = simulate(small, ranks, healthy.algorithm, root, None)
                break
            except calls.TooManySteps:
                most = ranks // 2
        sound = simulate(dataclasses.replace(small, faults=()), ranks, healthy.algorithm, root, None)
        slower = max(1.0, (broken.time_s or 0.0) / (sound.time_s or 1.0))
        text = f"in groups of {n} ranks, the slowdown by faults is an estimate: that of {ranks} ranks"
        self.notes[text] = self.notes.get(text, 0) + 1

        def longer(time_s: float) -> float:
            return healthy.late_s + (time_s - healthy.late_s) * slower

        return dataclasses.replace(
            healthy,
            time_s=longer(healthy.time_s or 0.0),
            band=healthy.band and (longer(healthy.band[0]), longer(healthy.band[1])),
            utilisation={name: share / slower for name, share in healthy.utilisation.items()},
            why=f"{healthy.why} without faults, which make it {slower:.2f} times as long (estimate)",
        )

    def assumed(self, collectives: Sequence[Collective]) -> list[tuple[str, int]]:
        """Arrivals and collisions that the times of collectives contain."""
        faulty = {str(f) for seen in self.views.values() for _, cluster in seen for f in cluster.faults}
        return [(note, 1) for c in collectives for note in c.simulated.notes if note not in faulty]

    def duration(self, work: Kernel | Exchange) -> float:
        return self.kernel(work) if isinstance(work, Kernel) else self.exchange(work)

    def end(self, high: bool) -> Duration:
        """Times at one end of the band."""

        def of(work: Kernel | Exchange) -> float:
            if isinstance(work, Kernel):
                if work.time_s is not None:
                    return self.kernel(work)
                return self.kernel(work) * _SLOWEST_KERNEL if high else self.kernel(work, ideal=True)
            found = self.simulated(work)
            return found.band[high] if found and found.band else 0.0

        return of


def _count(op: str, count: int, n: int, ranks: int) -> int:
    """Elements of the operand in a group of so many ranks instead of n."""
    return -(-count // ranks) * ranks if op in ("all_to_all", "psum_scatter") and ranks != n else count


def axes_of(mesh: Any) -> dict[str, int]:
    sizes = dict(mesh) if isinstance(mesh, dict) else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise StepError(f"step: mesh: expected names of axes with positive sizes, got {sizes}")
    return sizes


def _trace(step_fn: Callable[..., Any], args: Sequence[Any], given: Any, reader: Reader) -> Block:
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
    return block


def _table(timeline: Timeline, costs: Costs) -> tuple[Collective, ...]:
    rows: dict[tuple[Any, ...], Collective] = {}
    for run, times in timeline.leaves():
        work = run.task.work
        found = costs.simulated(work) if isinstance(work, Exchange) else None
        if found is None or not isinstance(work, Exchange):
            continue
        key = dataclasses.replace(work)
        before = rows.get((key,))
        count, exposed_s = times + (before.count if before else 0), times * run.exposed_s
        exposed_s += before.exposed_s if before else 0.0
        rows[(key,)] = Collective(
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
    shares["kernels with measured times"] = 0.0
    for run, times in timeline.leaves():
        work = run.task.work
        if isinstance(work, Kernel) and work.time_s is not None:
            shares["kernels with measured times"] += times * costs.kernel(work)
        elif isinstance(work, Kernel):
            by_bytes = work.bytes / (costs.whole.memory_bytes_per_s * costs.compute.memory_efficiency)
            busy_s = costs.kernel(work) - costs.compute.kernel_s
            shares["bytes of memory" if by_bytes >= busy_s else "operations of products"] += times * busy_s
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
    fidelity: str = "folded",
    skew: Skew | Sequence[float] | None = None,
    seed: int = 0,
    symmetric_buffers: bool = False,
) -> Step:
    """Predicts the time of a step on a cluster, from its jaxpr. No device is needed.

    Kernels take the larger of the times for their operations and their bytes; elementwise operations between two
    products are one kernel. Collectives take the time of ``collective`` while all groups of the mesh communicate.
    Those of ``jax.lax`` overlap with computation; jaxcomm's block it, as on a GPU stream. Ranks are row-major positions
    in the mesh: the last axis has consecutive ranks.

    Args:
      step_fn: a function with ``jax.shard_map`` inside, jitted or not.
      args: its arguments: arrays, or pytrees of jax.ShapeDtypeStruct.
      mesh: the mesh of the shard_map, an AbstractMesh, or a dict of sizes by axis.
      cluster: the cluster; its file has ``device.flops_bf16``.
      while_trips: iterations of a while loop, which a jaxpr does not know.
      fidelity: "folded" or "full", as in ``collective``.
      skew: arrivals of the ranks at each collective: a distribution, or seconds by rank of the mesh.
      seed: of the arrivals that are drawn from a distribution.
      symmetric_buffers: as in ``collective``.

    With faults, each collective takes the time of its slowest group. Each kernel takes the time of the slowest rank.

    Raises:
      StepError: a program without collectives or with ones that are not modelled, or with another mesh.
      ClusterError: a cluster that is too small, or groups that do not fit its levels.
    """
    if while_trips < 1:
        raise StepError(f"step: while_trips must be at least 1, got {while_trips}")
    given = skew if isinstance(skew, Skew) or skew is None else skews.given(skew)
    reader = Reader(while_trips, cluster.scope is not None)
    block = _trace(step_fn, args, mesh, reader)
    costs = Costs(cluster, axes_of(mesh), fidelity, given, seed, symmetric_buffers)
    return _of_block(block, costs, reader.notes)


def of_block(
    block: Block, mesh: Any, *, cluster: Cluster, fidelity: str = "folded", notes: dict[str, int] | None = None
) -> Step:
    """As ``step``, for tasks that every rank of the mesh executes. ``notes``: assumptions, with their places."""
    return _of_block(block, Costs(cluster, axes_of(mesh), fidelity), notes or {})


def _of_block(block: Block, costs: "Costs", notes: dict[str, int]) -> Step:
    timeline = execute(block, costs.duration)
    low, high = (execute(block, costs.end(end)).time_s for end in (False, True))
    notes = dict(notes)

    def note(text: str, count: int = 1) -> None:
        notes[text] = notes.get(text, 0) + count

    collectives = _table(timeline, costs)
    modelled = sum(c.simulated.steps == 0 and not c.simulated.utilisation for c in collectives)
    if modelled:
        note(f"collectives of more than {_MAX_STEPS} steps take the time of the cost model", modelled)
    for text, count in [*costs.notes.items(), *costs.assumed(collectives)]:
        note(text, count)
    kinds = [o.split(":")[0] for o in {**costs.whole.origins, **costs.compute.origins}.values()]
    kernels = [(run.task.work, times) for run, times in timeline.leaves() if isinstance(run.task.work, Kernel)]
    return Step(
        cluster=costs.whole.name,
        mesh=costs.mesh,
        time_s=timeline.time_s,
        band=(min(low, timeline.time_s), max(high, timeline.time_s)),
        least_s=timeline.least_s,
        serial_s=timeline.serial_s,
        compute_s=timeline.compute_s,
        communication_s=timeline.communication_s,
        exposed_s=timeline.exposed_s,
        late_s=sum(c.count * c.simulated.late_s for c in collectives),
        flops=sum(work.flops * times for work, times in kernels),
        bytes=sum(work.bytes * times for work, times in kernels),
        collectives=collectives,
        why=_why(timeline, collectives, costs),
        notes=(*costs.acting, *(f"{text} ({count} place(s))" for text, count in notes.items())),
        origins={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        timeline=timeline,
    )
