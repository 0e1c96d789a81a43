"""Nodes, ranks and links, as the planner sees them."""

import dataclasses
import os

import jax

from jaxcomm._core import plan


@dataclasses.dataclass(frozen=True)
class Link:
    """One class of link.

    Attributes:
      name: "self" (own memory), "node" (peers of the node) or "network" (peers of other nodes).
      latency_s: seconds per step that uses it.
      bytes_per_s: of one rank.
    """

    name: str
    latency_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Topology:
    """What the devices of this program can reach.

    Attributes:
      num_nodes: sets of devices that share memory.
      ranks_per_node: devices of each node.
      processors: processors that this process may use.
      links: link classes with the figures that predictions use.
    """

    num_nodes: int
    ranks_per_node: int
    processors: int
    links: tuple[Link, ...]

    def __str__(self) -> str:
        lines = [f"{self.num_nodes} node(s) of {self.ranks_per_node} rank(s), {self.processors} processor(s)"]
        lines += [
            f"  {link.name:8} {link.latency_s * 1e6:8.3f} us a step  {link.bytes_per_s / 1e9:8.1f} GB/s"
            for link in self.links
        ]
        return "\n".join(lines)


def topology() -> Topology:
    """Describes the CPU devices of this process: one node, since they share its memory.

    Latencies and bandwidths are the constants that the selection table works with, not a measurement of this machine.
    """
    num_ranks = jax.local_device_count("cpu")
    machine = plan.process_machine(num_ranks)
    links = tuple(Link(name, latency_s, bytes_per_s) for name, latency_s, bytes_per_s in machine.links)
    return Topology(1, num_ranks, len(os.sched_getaffinity(0)), links)
