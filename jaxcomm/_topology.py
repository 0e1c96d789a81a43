"""topology() and make_mesh(): nodes, ranks and links of the program."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm import _cost_params
from jaxcomm._core import plan
from jaxcomm._processes import placement


@dataclasses.dataclass(frozen=True)
class Link:
    """One class of link.

    Attributes:
      name: "self" (own memory), "node" (peers of the node) or "network" (peers of other nodes); on GPUs also "ll"
        (LL messages to peers of the node).
      overhead_s: time that a step or a signal occupies the sender, in addition to the time of its bytes.
      latency_s: time from the send to the arrival, in which the sender continues.
      bytes_per_s: bandwidth of one rank while all ranks are active. For "network", bandwidth of the link that the ranks
        of a node share.
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
    """Nodes, ranks and links of this program. ``str()`` gives a readable summary.

    Attributes:
      nodes: process numbers of each node; the processes of a node share memory.
      ranks: number of devices of each node.
      processors: number of processors that this process may use.
      links: link classes with the parameters of predictions.
      calibrated: True if calibrate() has measured these parameters, on this machine or on that of another process of
        the program. False if they are constants.
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
        lines.append("  measured by calibrate()" if self.calibrated else "  constants; calibrate() measures them")
        return "\n".join(lines)


def links_of(machine: Any) -> tuple[Link, ...]:
    """The links of a plan.Machine."""
    rows = [*machine.links, *([("ll", *machine.ll)] if machine.ll else [])]
    return tuple(Link(name, overhead_s, latency_s, bytes_per_s) for name, overhead_s, bytes_per_s, latency_s in rows)


def topology() -> Topology:
    """Describes the CPU devices of this program. With several processes, all must call it.

    The link parameters are those of the selection table for a group of all devices.

    Raises:
      RuntimeError: a process did not connect within JAXCOMM_TIMEOUT_S.
    """
    nodes = placement.nodes()
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
    """Returns a mesh whose inner axes stay inside a node if sizes allow it. With several processes, all must call it.

    Args:
      axis_shapes: sizes of the axes, outermost first.
      axis_names: names of the axes.
      devices: devices to use. The default is as many of jax.devices() as the mesh needs.
      axis_types: as in jax.sharding.Mesh.

    Returns:
      A mesh over the devices in the order of nodes, processes and device numbers.

    Raises:
      ValueError: fewer devices than the mesh needs.
      RuntimeError: a process did not connect within JAXCOMM_TIMEOUT_S.
    """
    node_of = {process: number for number, processes in enumerate(placement.nodes()) for process in processes}
    devices = jax.devices() if devices is None else devices
    if len(devices) < (size := math.prod(axis_shapes)):
        raise ValueError(f"make_mesh: axis_shapes {tuple(axis_shapes)} need {size} devices, got {len(devices)}")
    ordered = sorted(devices, key=lambda device: (node_of[device.process_index], device.process_index, device.id))
    grid = np.array(ordered[:size]).reshape(axis_shapes)
    return jax.sharding.Mesh(grid, tuple(axis_names), axis_types=axis_types)
