"""The part of a cluster that a group of ranks sees, while all groups of a call communicate at once."""

import dataclasses
import itertools

import numpy as np

from jaxcomm import _lowering
from jaxcomm.simulate.cluster.faults import Fault
from jaxcomm.simulate.cluster.levels import Level
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.cluster.toml_table import ClusterError


def members(
    mesh: dict[str, int], axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...] | None, what: str
) -> np.ndarray:
    """Ranks of each group, in the order of the axes: (groups, size). Ranks are row-major positions in the mesh.

    Raises:
      ClusterError: unknown axes, or groups of different sizes.
    """
    missing = [axis for axis in axes if axis not in mesh]
    if missing:
        raise ClusterError(f"{what}: axis {missing[0]!r} is not among those of the mesh, {', '.join(mesh)}")
    if groups is not None and len({len(group) for group in groups}) > 1:
        raise ClusterError(f"{what}: groups of different sizes are not simulated")
    return np.asarray(_lowering.replica_groups(tuple(mesh), tuple(mesh.values()), axes, groups))


def view(cluster: Cluster, ranks: np.ndarray, what: str) -> Cluster:
    """The cluster of these ranks alone, renumbered in ascending order.

    Every rank keeps its links into the first level and its adapters. Of links that ranks of other groups use too, the
    group gets its share: other groups of the call send the same at the same time.

    Args:
      cluster: as returned by Cluster.spread for all ranks of the mesh.
      ranks: of the group.
      what: name of the group, for messages.

    Raises:
      ClusterError: groups of one level hold different numbers of these ranks.
    """
    ranks = np.sort(ranks)
    levels: list[Level] = []
    for level in cluster.levels:
        counts = np.unique(ranks // level.ranks, return_counts=True)[1]
        if len(set(counts.tolist())) > 1:
            raise ClusterError(
                f"{what}: its ranks do not fill groups of {level.ranks} ranks evenly (level {level.name}); put an axis "
                "that divides them innermost"
            )
        count = int(counts[0])
        if level.kind == "rails":
            _check_rails(cluster, ranks, what)
        if level.paths:  # transfers of all groups collide
            own = levels[-1].ranks // (levels[0].ranks if len(levels) == 2 and levels[1].kind == "rails" else 1)
            level = dataclasses.replace(level, sharers=level.sharing // own)
        levels.append(dataclasses.replace(level, ranks=count))
        if count == len(ranks):
            break
    return dataclasses.replace(cluster, levels=tuple(levels))


def place(cluster: Cluster, fault: Fault) -> np.ndarray:
    """The ranks of the cluster, as spread over all ranks of the mesh, whose transfers pass the faulty link.

    Raises:
      ClusterError: there is no such link or rank.
    """
    names, n = [level.name for level in cluster.levels], cluster.ranks
    number = names.index(fault.level) if fault.level else 0
    if number < 2:
        count, ranks = n, np.array([fault.index])
    else:
        below, switches = cluster.levels[number - 1].ranks, _switches(cluster.levels, number)
        count = n // below * switches
        ranks = _first(cluster.levels, number, fault.index) + np.arange(0, below - fault.index % switches, switches)
    if fault.index >= count:
        raise ClusterError(f"{cluster.name}: fault {fault}: the index must be below {count}")
    return ranks


def check_faults(cluster: Cluster) -> None:
    """Refuses faults of links and ranks that the cluster does not have, and losses that cut off ranks.

    Raises:
      ClusterError: as above.
    """
    names = [level.name for level in cluster.levels]
    for fault in cluster.faults:
        if fault.planes:
            continue
        place(cluster, fault)
        if not fault.level or fault.capacity:
            continue
        in_domain = cluster.levels[0].kind == "switch"
        adapter = len(names) > 1 and fault.level == names[1]
        if not adapter or not in_domain or not (fault.out and fault.inward):
            raise ClusterError(
                f"{cluster.name}: fault {fault}: ranks would be cut off; only an adapter of a rank in a domain can be "
                "lost, in both directions"
            )
    relays(cluster)


def _switches(levels: tuple[Level, ...], number: int) -> int:
    """Switches with uplinks of their own in each group below a level: one for each rail."""
    return levels[0].ranks if number == 2 and levels[1].kind == "rails" else 1


def _link(levels: tuple[Level, ...], number: int, rank: int) -> int:
    """The link of a level that the transfers of a rank pass."""
    switches = _switches(levels, number)
    return rank // levels[number - 1].ranks * switches + rank % switches if number > 1 else rank


def _first(levels: tuple[Level, ...], number: int, link: int) -> int:
    """The first rank whose transfers pass a link of a level."""
    switches = _switches(levels, number)
    return link // switches * levels[number - 1].ranks + link % switches if number > 1 else link


def relays(cluster: Cluster) -> dict[int, int]:
    """The rank of the domain whose adapter carries the transfers of each lost adapter, if all ranks of it transfer."""
    level = cluster.levels[1].name if len(cluster.levels) > 1 else ""
    lost = {fault.index for fault in cluster.faults if fault.level and fault.level == level and fault.capacity == 0}
    inner = cluster.levels[0].ranks
    found = {}
    for rank in lost:
        others = [rank // inner * inner + (rank + 1 + i) % inner for i in range(inner - 1)]
        left = [other for other in others if other not in lost]
        if not left:
            raise ClusterError(f"{cluster.name}: all adapters of the domain of rank {rank} are lost")
        found[rank] = left[0]
    if len(cluster.levels) == 2 and cluster.levels[1].kind == "rails":  # no switch joins two rails
        gone: dict[int, set[int]] = {}
        for rank in lost:
            gone.setdefault(rank // inner, set()).add(rank % inner)
        for one, other in itertools.combinations(sorted(gone), 2):
            if len(gone[one] | gone[other]) == inner:
                domains = f"the domains of ranks {one * inner} and {other * inner}"
                raise ClusterError(f"{cluster.name}: {domains} have no rail left in common")
    return found


def broken(cluster: Cluster, seen: Cluster, ranks: np.ndarray) -> tuple[Fault, ...]:
    """The faults of a cluster that these ranks meet, in the numbers of the cluster that they see.

    Another rank of the group relays the transfers of a lost adapter, as in ``collective``. If the group has no other
    rank of that domain, the next rank of the domain does. Two groups then share its adapter, and the hop to it adds the
    latency of the domain.

    Args:
      cluster: as spread for all ranks of the mesh, with its faults.
      seen: as returned by ``view``.
      ranks: of the group.
    """
    ranks = np.sort(ranks)
    names = [level.name for level in cluster.levels]
    inner, carried = cluster.levels[0].ranks, relays(cluster)
    shares: dict[tuple[int, int, bool, bool], tuple[float, float]] = {}  # and latency; by level, index and directions
    found = []

    def mates(rank: int) -> int:
        return sum(int(other) // inner == rank // inner and int(other) not in carried for other in ranks)

    for fault in cluster.faults:
        number = names.index(fault.level) if fault.level else 0
        if fault.planes or number >= len(seen.levels):
            continue
        at = np.flatnonzero(np.isin(ranks, place(cluster, fault)))
        if not len(at):
            continue
        index = _link(seen.levels, number, int(at[0]))
        if not fault.level or (fault.capacity == 0 and mates(fault.index)):
            found.append(dataclasses.replace(fault, index=index))
        elif fault.capacity > 0:
            shares[number, index, fault.out, fault.inward] = fault.capacity, 0.0
    for rank, relay in carried.items() if len(seen.levels) > 1 else ():
        at = np.flatnonzero(ranks == rank)
        if len(at) and not mates(rank):
            own = min([f.capacity for f in cluster.faults if (f.level, f.index) == (names[1], relay)], default=1.0)
            share = own / (1 + list(carried.values()).count(relay))
            shares[1, int(at[0]), True, True] = share, cluster.levels[0].latency_s
    found += [
        Fault(names[number], index, out, inward, share, latency_s=latency_s)
        for (number, index, out, inward), (share, latency_s) in shares.items()
    ]
    return tuple(found)


def _check_rails(cluster: Cluster, ranks: np.ndarray, what: str) -> None:
    inner = cluster.levels[0].ranks
    first = ranks[ranks // inner == ranks[0] // inner] % inner
    if not np.array_equal(np.tile(first, len(ranks) // len(first)), ranks % inner):
        raise ClusterError(
            f"{what}: its ranks are on different rails in different domains of {inner} ranks; use mesh axes whose "
            f"sizes divide {inner} innermost"
        )
