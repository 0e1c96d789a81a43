"""Times of the kernels and collectives of a step on a cluster."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm._request import splits_operand
from jaxcomm.simulate import collectives
from jaxcomm.simulate.cluster import faults, groups
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.cluster.toml_table import ClusterError
from jaxcomm.simulate.step.result import Collective
from jaxcomm.simulate.step.schedule import Duration
from jaxcomm.simulate.step.tasks import Exchange, Kernel, StepError

# Of one collective; beyond, the cost model gives its time.
MAX_STEPS = 300_000
# Kernels take at least the time of the data sheet's peaks, and at most twice the estimate: a guess.
_SLOWEST_KERNEL = 2.0


class Costs:
    """Times of kernels and collectives. Equal collectives are simulated once.

    Attributes:
      compute, mesh: of a device; sizes of the axes.
      cluster: the part of the cluster that the mesh uses, without its faults.
      broken: the same with its faults, in the numbers of the ranks that go on.
      acting: texts of the faults that act on the step.
    """

    def __init__(self, cluster: Cluster, mesh: dict[str, int], symmetric_buffers: bool = False):
        if cluster.compute is None:
            raise ClusterError(f"{cluster.name}: device.flops_bf16: is missing; step needs it")
        self.compute, self.mesh = cluster.compute, mesh
        self.symmetric_buffers = symmetric_buffers
        n = math.prod(mesh.values())
        if n > cluster.ranks:
            raise ClusterError(f"{cluster.name}: the mesh has {n} ranks, but the cluster has {cluster.ranks}")
        groups.check_faults(cluster)
        self.given = cluster.faults
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

    def roofline(self, work: Kernel, ideal: bool = False) -> tuple[float, float]:
        """Times for the operations and for the bytes."""
        of, dtype = self.compute, work.dtype or "bfloat16"
        peak = of.flops_per_s * 2 / max(jax.numpy.dtype(dtype).itemsize, 1)
        shares = (1.0, 1.0) if ideal else (of.efficiency, of.memory_efficiency)
        return work.flops / (peak * shares[0]), work.bytes / (self.cluster.memory_bytes_per_s * shares[1])

    def kernel(self, work: Kernel, ideal: bool = False) -> float:
        """Time on the slowest rank, with the start of the kernel unless ideal."""
        return self.slow * (max(self.roofline(work, ideal)) + (0 if ideal else self.compute.kernel_s))

    def simulated(self, work: Exchange) -> collectives.Simulated | None:
        """None for a group of one rank, which transfers nothing."""
        key = dataclasses.replace(work, site="", asynchronous=False)
        if key not in self.found:
            self.found[key] = self._simulate(work)
        return self.found[key]

    def _seen(self, work: Exchange, what: str) -> list[tuple[np.ndarray, Cluster]]:
        """The first group and those with faults, and the cluster that each sees."""
        rows = groups.members(self.mesh, work.axes, work.groups, what)
        group_of = np.full(rows.max() + 1, -1)
        group_of[rows] = np.arange(len(rows))[:, None]
        wanted = {0}
        for some in self.places:
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
        bytes_of = (_count(op, work.count, n) * dtype.itemsize, dtype.itemsize)
        key = (op, bytes_of, cluster.levels, cluster.faults, algorithm, work.max_sms, perm, source)

        if key not in self.classes:
            try:
                self.classes[key] = collectives.collective(
                    op,
                    jax.ShapeDtypeStruct((_count(op, work.count, n),), dtype),
                    n,
                    cluster=cluster,
                    algorithm=algorithm,
                    source=source,
                    perm=perm,
                    max_sms=work.max_sms,
                    max_steps=None if cluster.faults else MAX_STEPS,
                    symmetric_buffers=self.symmetric_buffers,
                )
            except ValueError as error:
                raise StepError(f"step: {what}: {error}") from None
        return self.classes[key]

    def idle(self) -> list[str]:
        """Notes about the other faults of the cluster."""
        found = [str(fault) for fault in self.given if str(fault) not in self.acting]
        return [f"without effect on this step: {text}" for text in found]

    def assumed(self, collectives: Sequence[Collective]) -> list[tuple[str, int]]:
        """Collisions that the times of collectives contain."""
        faulty = {str(f) for seen in self.views.values() for _, cluster in seen for f in cluster.faults}
        return [(note, 1) for c in collectives for note in c.simulated.notes if note not in faulty]

    def duration(self, work: Kernel | Exchange) -> float:
        if isinstance(work, Kernel):
            return self.kernel(work)
        found = self.simulated(work)
        return found.time_s or 0.0 if found else 0.0

    def end(self, high: bool) -> Duration:
        """Times at one end of the interval."""

        def of(work: Kernel | Exchange) -> float:
            if isinstance(work, Kernel):
                return self.kernel(work) * _SLOWEST_KERNEL if high else self.kernel(work, ideal=True)
            found = self.simulated(work)
            return found.interval[high] if found and found.interval else 0.0

        return of


def _count(op: str, count: int, ranks: int) -> int:
    """Elements of the operand of a rank: n equal blocks, if the operation needs them."""
    return -(-count // ranks) * ranks if splits_operand(op) else count
