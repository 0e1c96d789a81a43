"""Times of the kernels and collectives of a step on a cluster."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm._request import splits_operand
from jaxcomm.simulate import collectives
from jaxcomm.simulate.cluster import faults, groups
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.cluster.skew import Skew
from jaxcomm.simulate.cluster.toml_table import ClusterError
from jaxcomm.simulate.step.result import Collective
from jaxcomm.simulate.step.schedule import Duration
from jaxcomm.simulate.step.tasks import Exchange, Kernel, StepError

# Of one collective; beyond, the cost model gives its time.
MAX_STEPS = 300_000
# Of one group with faults; beyond, a smaller group gives the slowdown.
_MAX_BROKEN_STEPS = 1_000_000
# Of that smaller group, at most.
_SMALL_RANKS = 256
# Kernels take at least the time of the data sheet's peaks, and at most twice the estimate: a guess.
_SLOWEST_KERNEL = 2.0


class Costs:
    """Times of kernels and collectives. Equal collectives are simulated once.

    Attributes:
      compute, mesh: of a device; sizes of the axes.
      cluster: the part of the cluster that the mesh uses, without its faults.
      broken: the same with its faults, in the numbers of the ranks that go on.
      acting: texts of the faults that act on the step.
      notes: assumptions, with their number.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: dict[str, int],
        skew: Skew | None = None,
        seed: int = 0,
        symmetric_buffers: bool = False,
    ):
        if cluster.compute is None:
            raise ClusterError(f"{cluster.name}: device.flops_bf16: is missing; step needs it")
        self.compute, self.mesh = cluster.compute, mesh
        self.skew, self.seed, self.symmetric_buffers = skew, seed, symmetric_buffers
        n = math.prod(mesh.values())
        if skew is not None and skew.kind == "list" and len(skew.arrivals_s) != n:
            raise StepError(f"step: skew has {len(skew.arrivals_s)} arrivals, expected one for each of {n} ranks")
        if n > cluster.ranks:
            raise ClusterError(f"{cluster.name}: the mesh has {n} ranks, but the cluster has {cluster.ranks}")
        self.notes: dict[str, int] = {}
        groups.check_faults(cluster)
        self.cluster = dataclasses.replace(cluster, faults=()).spread(n)
        broken, given = self._survive(cluster, n)
        names = [level.name for level in self.cluster.levels]
        used = [not fault.planes and (not fault.level or fault.level in names) for fault in broken]
        self.acting = [str(fault) for fault in cluster.faults if fault.slow == 0 and fault.index < n]
        self.acting += [str(fault) for fault in cluster.faults if fault.planes and fault.level in names]
        self.texts = [str(fault) for fault, kept in zip(given, used, strict=True) if kept]
        broken = tuple(fault for fault, kept in zip(broken, used, strict=True) if kept)
        self.broken = dataclasses.replace(self.cluster, faults=broken)
        self.places = [groups.place(self.broken, fault) for fault in broken]
        self.slow = max([fault.slow for fault in broken], default=1.0)
        self.acting += [text for text, fault in zip(self.texts, broken, strict=True) if not fault.level]
        if self.slow > 1:
            self.acting.append("each kernel takes the time of the slowest rank")
        if any(fault.slow == 0 for fault in cluster.faults):
            self.acting.append("other ranks of the cluster replace the lost ones")
        self.found: dict[Exchange, collectives.Simulated | None] = {}
        self.classes: dict[tuple[Any, ...], collectives.Simulated] = {}
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
        time_s = max(work.flops / (peak * shares[0]), work.bytes / (self.cluster.memory_bytes_per_s * shares[1]))
        return self.slow * (time_s if ideal else time_s + of.kernel_s)

    def simulated(self, work: Exchange) -> collectives.Simulated | None:
        """None for a group of one rank, which transfers nothing."""
        key = dataclasses.replace(work, site="", asynchronous=False)
        if key not in self.found:
            self.found[key] = self._simulate(work)
        return self.found[key]

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
            cluster = groups.view(self.cluster, row, what)
            if len(row) > 1:
                self._act(row, cluster)
            broken = groups.broken(self.broken, cluster, row)
            found.append((row, dataclasses.replace(cluster, faults=broken)))
        return found

    def _act(self, row: np.ndarray, seen: Cluster) -> None:
        """Notes the faulty links that a group uses."""
        names = [level.name for level in self.cluster.levels]
        sizes = [1, *(level.ranks for level in seen.levels)]
        for fault, place, text in zip(self.broken.faults, self.places, self.texts, strict=True):
            number = names.index(fault.level) if fault.level else 0
            acts = fault.level and number < len(seen.levels) and sizes[number + 1] > sizes[number]
            if acts and text not in self.acting and np.isin(row, place).any():
                self.acting.append(text)

    def _simulate(self, work: Exchange) -> collectives.Simulated | None:
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

    def _of_group(self, work: Exchange, ranks: np.ndarray, cluster: Cluster, what: str) -> collectives.Simulated:
        n = len(ranks)
        place = np.argsort(np.argsort(ranks))  # of each member in ascending order
        perm = None if work.perm is None else tuple((int(place[s]), int(place[d])) for s, d in work.perm)
        op = "all_to_all" if work.op == "ragged_all_to_all" else work.op  # rows are spread evenly
        algorithm = None if op != work.op else work.algorithm
        dtype = jax.numpy.dtype(work.dtype)
        source = int(place[work.source])
        skew = self.skew
        if skew is not None and skew.kind == "list":
            skew = dataclasses.replace(skew, arrivals_s=tuple(skew.arrivals_s[rank] for rank in np.sort(ranks)))
        bytes_of = (_count(op, work.count, n) * dtype.itemsize, dtype.itemsize)
        key = (op, bytes_of, cluster.levels, cluster.faults, algorithm, work.max_sms, perm, source, skew)

        def simulate(seen: Cluster, ranks: int, source: int, **changes: Any) -> collectives.Simulated:
            arguments = {"algorithm": algorithm, "perm": perm, "skew": skew, **changes}
            return collectives.collective(
                op,
                jax.ShapeDtypeStruct((_count(op, work.count, ranks),), dtype),
                ranks,
                cluster=seen,
                source=source,
                max_sms=work.max_sms,
                max_steps=_MAX_BROKEN_STEPS if seen.faults else MAX_STEPS,
                seed=self.seed,
                symmetric_buffers=self.symmetric_buffers,
                **arguments,
            )

        if key not in self.classes:
            try:
                try:
                    self.classes[key] = simulate(cluster, n, source)
                except collectives.TooManySteps:
                    if perm is not None:
                        raise
                    self.classes[key] = self._estimate(simulate, cluster, n, source)
            except ValueError as error:
                raise StepError(f"step: {what}: {error}") from None
        return self.classes[key]

    def _estimate(
        self, simulate: Callable[..., collectives.Simulated], seen: Cluster, n: int, source: int
    ) -> collectives.Simulated:
        """The time without faults, times the slowdown of a smaller group of the same levels with the same plan."""
        healthy = simulate(dataclasses.replace(seen, faults=()), n, source)
        most = min(_SMALL_RANKS, n - 1)
        while True:
            made = groups.smaller(seen, most, source)
            if made is None:
                raise collectives.TooManySteps(
                    f"{healthy.op}: the faults leave few ranks of equal role among {n}, and no smaller group has the "
                    "same levels; use smaller groups"
                )
            small, root = made
            ranks = small.levels[-1].ranks
            same: dict[str, Any] = {"source": root, "algorithm": healthy.algorithm, "skew": None}
            try:
                broken = simulate(small, ranks, **same)
                break
            except collectives.TooManySteps:
                most = ranks // 2
        sound = simulate(dataclasses.replace(small, faults=()), ranks, **same)
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
        if isinstance(work, Kernel):
            return self.kernel(work)
        found = self.simulated(work)
        return found.time_s or 0.0 if found else 0.0

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


def _count(op: str, count: int, ranks: int) -> int:
    """Elements of the operand of a rank: n equal blocks, if the operation needs them."""
    return -(-count // ranks) * ranks if splits_operand(op) else count
