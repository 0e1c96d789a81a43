"""The part of a cluster that a group of ranks sees, while all groups of a call communicate at once."""

import dataclasses

import numpy as np

from jaxcomm import _lowering
from jaxcomm.simulate.cluster import Cluster, ClusterError, Level


def members(
    mesh: dict[str, int], axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...] | None, what: str
) -> np.ndarray:
    """Ranks of the first group, in the order of the axes. Ranks are row-major positions in the mesh.

    Raises:
      ClusterError: unknown axes, or groups of different sizes.
    """
    missing = [axis for axis in axes if axis not in mesh]
    if missing:
        raise ClusterError(f"{what}: axis {missing[0]!r} is not among those of the mesh, {', '.join(mesh)}")
    if groups is not None and len({len(group) for group in groups}) > 1:
        raise ClusterError(f"{what}: groups of different sizes are not simulated")
    return np.asarray(_lowering.replica_groups(tuple(mesh), tuple(mesh.values()), axes, groups)[0])


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
        if level.kind == "torus":
            level = _torus(level, ranks[ranks // level.ranks == ranks[0] // level.ranks], what)
        elif level.kind == "mesh":  # each pair keeps its link
            share = (count - 1) / (level.ranks - 1) if level.ranks > 1 else 1.0
            level = dataclasses.replace(level, bytes_per_s=level.bytes_per_s * (share or 1.0))
        elif level.kind == "rails":
            _check_rails(cluster, ranks, what)
        if level.shared:
            below = len(levels) and levels[0].ranks / cluster.levels[0].ranks
            level = dataclasses.replace(level, bytes_per_s=level.bytes_per_s * below)
        levels.append(dataclasses.replace(level, ranks=count))
        if count == len(ranks):
            break
    return dataclasses.replace(cluster, levels=tuple(levels))


def _check_rails(cluster: Cluster, ranks: np.ndarray, what: str) -> None:
    inner = cluster.levels[0].ranks
    first = ranks[ranks // inner == ranks[0] // inner] % inner
    if not np.array_equal(np.tile(first, len(ranks) // len(first)), ranks % inner):
        raise ClusterError(
            f"{what}: its ranks are on different rails in different domains of {inner} ranks; use mesh axes whose "
            f"sizes divide {inner} innermost"
        )


def _torus(level: Level, ranks: np.ndarray, what: str) -> Level:
    """The whole dimensions that the ranks span."""
    places = np.unravel_index(ranks % level.ranks, level.dims[::-1])[::-1]  # the first dimension is the innermost
    spans = [len(set(place.tolist())) for place in places]
    partial = [size for span, size in zip(spans, level.dims, strict=True) if span not in (1, size)]
    if partial or int(np.prod(spans)) != len(ranks):
        raise ClusterError(f"{what}: its ranks are not whole dimensions of the torus {'x'.join(map(str, level.dims))}")
    return dataclasses.replace(level, dims=tuple(span for span in spans if span > 1) or (1,))
