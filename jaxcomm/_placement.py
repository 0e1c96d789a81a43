"""Where ranks are: processes and nodes of the ranks of replica groups."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Hashable, Iterable

import jax
import numpy as np

from jaxcomm import _bootstrap, _compat
from jaxcomm._typing import AnyMesh


def nodes() -> list[list[int]]:
    """The processes of each node, in the order of their first process; all processes must ask."""
    if jax.process_count() == 1:
        return [[0]]
    _bootstrap.read_records(range(jax.process_count()))
    by_name: dict[str, list[int]] = {}
    for process in range(jax.process_count()):
        by_name.setdefault(_bootstrap.node_of(process), []).append(process)
    return list(by_name.values())


@dataclasses.dataclass(frozen=True)
class GroupPlacement:
    """Processes and nodes of replica groups; the same in all processes.

    Attributes:
      processes: of each device, group after group; empty if all are of this process.
      ranks_per_node: ranks of a group that share a node, if each group consists of whole nodes one after the other, all
        with as many ranks; 1 if not; None if every group is of one node.
    """

    processes: np.ndarray
    ranks_per_node: int | None


def ranks_per_node(nodes: Iterable[Hashable]) -> int:
    """Of one group, given the node of each rank."""
    nodes = list(nodes)
    runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(nodes)) else 1


@functools.cache
def _leave_compilation_cache() -> None:
    """Switches JAX's persistent compilation cache off: an executable from it numbers its run ids differently.

    Processes identify a call by these ids. JAX writes the cache in process 0 only, and on CPUs process 0 alone finds
    its entries.
    """
    if _compat.leave_compilation_cache():
        logging.getLogger("jaxcomm").warning(
            "JAX's persistent compilation cache is switched off: collectives between processes of CPUs can't use it"
        )


def placement(mesh: AnyMesh, rows: np.ndarray) -> GroupPlacement:
    """Placement of the replica groups `rows`. Connects to the processes of the groups that this process is in."""
    nowhere_else = GroupPlacement(np.empty(0, np.int32), None)
    if jax.process_count() == 1:
        return nowhere_else
    if not isinstance(mesh, jax.sharding.Mesh):
        raise NotImplementedError("with several processes jaxcomm needs a mesh of devices, not an AbstractMesh")
    processes = np.array([device.process_index for device in mesh.devices.flat], np.int32)[rows]
    own = jax.process_index()
    if (processes == own).all():
        return nowhere_else
    _leave_compilation_cache()
    _bootstrap.read_records(sorted({int(p) for p in processes.flat}))
    _bootstrap.connect(sorted({int(p) for row in processes if own in row for p in row}))
    sizes = {ranks_per_node([_bootstrap.node_of(int(p)) for p in row]) for row in processes}
    if sizes == {rows.shape[1]}:
        return GroupPlacement(processes.reshape(-1), None)
    return GroupPlacement(processes.reshape(-1), sizes.pop() if len(sizes) == 1 else 1)


def gpu_groups(mesh: AnyMesh, rows: np.ndarray) -> np.ndarray:
    """Process and local number of each GPU, group after group, for an XLA that provides no communicators.

    Raises:
      RuntimeError: the process of a group's first rank did not compile the call within JAXCOMM_TIMEOUT_S.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise NotImplementedError("with jaxlib before 0.11.2 jaxcomm needs a mesh of devices, not an AbstractMesh")
    devices = mesh.devices.reshape(-1)
    members = [[(device.process_index, device.local_hardware_id) for device in devices[row]] for row in rows]
    if devices[0].platform == "gpu":  # else the call is only lowered for them
        for group in members:
            if any(process == jax.process_index() for process, _ in group):
                _bootstrap.join_gpu_group(tuple(group))
    return np.array(members, np.int32).reshape(-1)
