"""Processes and nodes of the ranks of replica groups."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Hashable, Iterable

import jax
import numpy as np

from jaxcomm import _compat
from jaxcomm._config import config
from jaxcomm._processes import bootstrap
from jaxcomm._typing import AnyMesh


def nodes() -> list[list[int]]:
    """The processes of each node, ordered by first process. All processes must call it."""
    if jax.process_count() == 1:
        return [[0]]
    bootstrap.read_records(range(jax.process_count()))
    by_name: dict[str, list[int]] = {}
    for process in range(jax.process_count()):
        by_name.setdefault(bootstrap.node_of(process), []).append(process)
    return list(by_name.values())


@dataclasses.dataclass(frozen=True)
class GroupPlacement:
    """Processes and nodes of replica groups; equal in all processes.

    Attributes:
      processes: process of each device, group after group; empty if all devices belong to this process.
      ranks_per_node: None if each group is on one node. Otherwise the number of ranks of a group per node, if that
        number is the same everywhere and the ranks of a node are consecutive; else 1.
      devices: JAX's id of each device, in the same order; empty if all devices belong to this process.
    """

    processes: np.ndarray
    ranks_per_node: int | None
    devices: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))


def ranks_per_node(nodes: Iterable[Hashable]) -> int:
    """Ranks per node of one group, from the node of each rank; 1 if nodes are unequal or not consecutive."""
    nodes = list(nodes)
    runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(nodes)) else 1


def _ranks_per_node_of_groups(nodes: Iterable[list[Hashable]]) -> int | None:
    """GroupPlacement.ranks_per_node, from the node of each rank of each group."""
    nodes = list(nodes)
    sizes = {ranks_per_node(group) for group in nodes}
    if sizes == {len(nodes[0])}:
        return None
    return sizes.pop() if len(sizes) == 1 else 1


def ranks_per_node_for_xla(mesh: AnyMesh, rows: np.ndarray, platform: str) -> int | None:
    """GroupPlacement.ranks_per_node of groups that XLA's own collectives serve: it connects no processes.

    On CPUs, nodes are those of jaxcomm. On other platforms, they are the hosts, NVLink domains or TPU slices of JAX.
    """
    if jax.process_count() == 1 or not isinstance(mesh, jax.sharding.Mesh):
        return None
    devices = mesh.devices.reshape(-1)
    if platform != "cpu":
        return _ranks_per_node_of_groups([_host(device) for device in devices[row]] for row in rows)
    bootstrap.read_records(sorted({device.process_index for device in devices}))
    return _ranks_per_node_of_groups(
        [bootstrap.node_of(device.process_index) for device in devices[row]] for row in rows
    )


@functools.cache
def _leave_compilation_cache() -> None:
    """Switches JAX's persistent compilation cache off.

    Processes identify a call by XLA's run ids, and an executable from the cache numbers its run ids differently. On
    CPUs, only process 0 writes the cache and finds its entries, so the ids of processes would differ.
    """
    if _compat.leave_compilation_cache():
        logging.getLogger("jaxcomm").warning(
            "JAX's persistent compilation cache is switched off: collectives between CPU processes can't use it"
        )


def of_groups(mesh: AnyMesh, rows: np.ndarray) -> GroupPlacement:
    """Placement of the replica groups `rows`. Connects this process to the processes of its groups."""
    nowhere_else = GroupPlacement(np.empty(0, np.int32), None)
    if jax.process_count() == 1:
        return nowhere_else
    if not isinstance(mesh, jax.sharding.Mesh):
        raise NotImplementedError(
            "jaxcomm: programs of several processes need a jax.sharding.Mesh, got an AbstractMesh"
        )
    processes = np.array([device.process_index for device in mesh.devices.flat], np.int32)[rows]
    own = jax.process_index()
    if (processes == own).all():
        return nowhere_else
    _leave_compilation_cache()
    bootstrap.read_records(sorted({int(p) for p in processes.flat}))
    bootstrap.connect(sorted({int(p) for row in processes if own in row for p in row}))
    per_node = _ranks_per_node_of_groups([bootstrap.node_of(int(p)) for p in row] for row in processes)
    ids = [device.id for device in mesh.devices.flat]
    return GroupPlacement(processes.reshape(-1), per_node, np.array(ids, np.int32)[rows.reshape(-1)])


def gpus_are_on_one_host(mesh: AnyMesh, rows: np.ndarray) -> bool:
    """Whether the GPUs of each group are certainly on one host, or in one NVLink domain of several hosts.

    Processes on one host have equal slice indices. JAX compares the boot ids of hosts, or the ids of NVLink domains.
    """
    if jax.process_count() == 1:
        return True
    if not isinstance(mesh, jax.sharding.Mesh) or config().node_id is not None:
        return False
    devices = mesh.devices.reshape(-1)
    return all(len({_host(device) for device in devices[row]}) == 1 for row in rows)


def gpus_per_host(mesh: AnyMesh, rows: np.ndarray) -> int:
    """Ranks per host of each group of GPUs, all of them if NVLink may connect the whole group; 1 if it is unknown."""
    if gpus_are_on_one_host(mesh, rows):
        return int(rows.shape[1])
    return ranks_per_node_for_xla(mesh, rows, "cuda") or 1


def _host(device: jax.Device) -> tuple[int | None, int | None]:
    slice_index = getattr(device, "slice_index", None)
    return (slice_index, None) if slice_index is not None else (None, device.process_index)


def gpu_processes(mesh: AnyMesh, rows: np.ndarray) -> np.ndarray | None:
    """Process of each GPU, group after group, equal in all processes. None if the mesh is abstract or has no GPUs."""
    devices = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []
    if not devices or devices[0].platform != "gpu":
        return None
    processes: np.ndarray = np.array([device.process_index for device in devices], np.int32)
    return np.asarray(processes[rows].reshape(-1))
