"""Nodes, ranks and links, as the planner sees them."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm import _cost_params, _placement
from jaxcomm._core import plan


@dataclasses.dataclass(frozen=True)
class Link:
    """One class of link.

    Attributes:
      name: "self" (own memory), "node" (peers of the node) or "network" (peers of other nodes); on GPUs also "ll"
        (LL messages to peers of the node).
      overhead_s: time of the sender for a step or a signal, without its bytes.
      latency_s: time until the data arrives, while the sender continues.
      bytes_per_s: bandwidth of one rank while all ranks work; for "network", of the link that a node shares.
    """

    name: str
    overhead_s: float
    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.name:8} {self.overhead_s * 1e6:9.3f} us a step {self.latency_s * 1e6:9.3f} us latency "
            f"{self.bytes_per_s / 1e9:9.3f} GB/s"
        )


@dataclasses.dataclass(frozen=True)
class Topology:
    """The result of topology(). ``str()`` returns a summary.

    Attributes:
      nodes: processes of each node; they share memory.
      ranks: number of devices of each node.
      processors: number of processors that this process may use.
      links: links with the parameters that predictions use.
      calibrated: whether calibrate() has measured these parameters, on this machine or on that of another process of
        the program. If not, they are constants.
    """

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    processors: int
    links: tuple[Link, ...]
    calibrated: bool

    def __str__(self) -> str:
        lines = [f"{len(self.nodes)} node(s), {sum(self.ranks)} rank(s), {self.processors} processor(s)"]
        lines += [
            f"  node {number}: {ranks} rank(s) of process(es) {', '.join(map(str, processes))}"
            for number, (processes, ranks) in enumerate(zip(self.nodes, self.ranks, strict=True))
        ]
        lines += [f"  {link}" for link in self.links]
        lines.append("  measured by calibrate()" if self.calibrated else "  constants; calibrate() measures")
        return "\n".join(lines)


def links_of(machine: Any) -> tuple[Link, ...]:
    """Those of a plan.Machine."""
    rows = [*machine.links, *([("ll", *machine.ll)] if machine.ll else [])]
    return tuple(Link(name, overhead_s, latency_s, bytes_per_s) for name, overhead_s, bytes_per_s, latency_s in rows)


def topology() -> Topology:
    """Describes the CPU devices of this program. With several processes, all must call it.

    The parameters of the links are those that the selection uses for a group of all devices.

    Raises:
      RuntimeError: a process did not show up within JAXCOMM_TIMEOUT_S.
    """
    nodes = _placement.nodes()
    devices = [device.process_index for device in jax.devices("cpu")]
    ranks = [sum(map(devices.count, processes)) for processes in nodes]
    _cost_params.load()
    scope = "process" if len(set(devices)) == 1 else "node" if len(nodes) == 1 else "network"
    machine = plan.machine_of(scope, len(devices), max(ranks))
    processors = len(os.sched_getaffinity(0))
    calibrated = scope in _cost_params.measured
    return Topology(tuple(map(tuple, nodes)), tuple(ranks), processors, links_of(machine), calibrated)


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    *,
    devices: Sequence[jax.Device] | None = None,
    axis_types: Any = None,
) -> jax.sharding.Mesh:
    """A mesh whose inner axes stay inside a node where sizes allow it. With several processes, all must call it.

    Args:
      axis_shapes: sizes of the axes, outermost first.
      axis_names: their names.
      devices: those to use; by default the first of all.
      axis_types: as in jax.sharding.Mesh.

    Returns:
      A mesh over the devices in the order of nodes, processes and device numbers.

    Raises:
      ValueError: fewer devices than the mesh has places.
      RuntimeError: a process did not show up within JAXCOMM_TIMEOUT_S.
    """
    node_of = {process: number for number, processes in enumerate(_placement.nodes()) for process in processes}
    devices = jax.devices() if devices is None else devices
    if len(devices) < (size := math.prod(axis_shapes)):
        raise ValueError(f"make_mesh: axis_shapes {tuple(axis_shapes)} need {size} devices, got {len(devices)}")
    ordered = sorted(devices, key=lambda device: (node_of[device.process_index], device.process_index, device.id))
    grid = np.array(ordered[:size]).reshape(axis_shapes)
    return jax.sharding.Mesh(grid, tuple(axis_names), axis_types=axis_types)
