"""A cluster: levels of links with the origin of every figure."""

import dataclasses
import importlib.resources
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxcomm._core import sim
from jaxcomm.simulate.cluster import ecmp, toml
from jaxcomm.simulate.cluster.faults import Fault
from jaxcomm.simulate.cluster.levels import Compute, Level
from jaxcomm.simulate.cluster.toml_table import ClusterError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster of equal devices. ``Cluster.load`` reads one; ``str()`` lists its figures with their origins.

    Attributes:
      name: for messages.
      device: kind of the devices, such as "GB200".
      levels: innermost first.
      memory_bytes, memory_bytes_per_s: size and bandwidth of a device's memory.
      copy: (overhead_s, bytes_per_s) of copies inside a device.
      launch_s, sync_overhead_s: start of a call, and synchronization of all ranks before and after it.
      channels: most thread blocks of a call.
      channel_bytes_per_s: limit of one thread block.
      ll: (overhead_s, bytes_per_s, latency_s) of LL messages; None: the cluster has none.
      origins: origin of each figure, by "table.key".
      compute: computation of a device; None if the file has no ``flops_bf16``.
      faults: degraded and lost links, planes and ranks, and slow ranks.
    """

    name: str
    device: str
    levels: tuple[Level, ...]
    memory_bytes: float = math.inf
    memory_bytes_per_s: float = math.inf
    copy: tuple[float, float] = (0.0, math.inf)
    launch_s: float = 0.0
    sync_overhead_s: float = 0.0
    channels: int = 1
    channel_bytes_per_s: float = math.inf
    ll: tuple[float, float, float] | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compute: Compute | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def ranks(self) -> int:
        return self.levels[-1].ranks

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.ranks} ranks ({self.device})"]
        lines += [f"  {level.name}: {level.kind}, groups of {level.ranks}" for level in self.levels]
        lines += [f"  {key}: {origin}" for key, origin in self.origins.items()]
        lines += [f"  fault: {fault}" for fault in self.faults]
        return "\n".join(lines)

    @staticmethod
    def names() -> list[str]:
        """Names of the clusters in the package, for ``load``."""
        return sorted(path.name.removesuffix(".toml") for path in _presets().iterdir() if path.name.endswith(".toml"))

    @staticmethod
    def load(name: str | os.PathLike[str], changes: Mapping[str, str] | None = None) -> "Cluster":
        """Reads a cluster: the name of one in the package, or the path of a TOML file.

        Args:
          name: of the cluster or the file.
          changes: values by key, such as {"leaf.bandwidth": "800 Gb/s"}, that replace those of the file. The key
            "fault.leaf[3]" with a share adds a fault.

        Raises:
          ClusterError: the file is not valid; the text names file and key.
          OSError: the file cannot be read.
        """
        text = str(name)
        if text in Cluster.names():
            return Cluster(**toml.parse((_presets() / f"{text}.toml").read_text(encoding="utf-8"), text, changes))
        if not text.endswith(".toml") and not pathlib.Path(text).exists():
            raise ClusterError(f"cluster {text!r} is neither a file nor one of {', '.join(Cluster.names())}")
        return Cluster(**toml.parse(pathlib.Path(text).read_text(encoding="utf-8"), text, changes))

    def spread(self, ranks: int) -> "Cluster":
        """The part of the cluster that this number of ranks uses, as many in each group of a level.

        Where they do not fill whole groups, the groups hold fewer ranks: 1440 ranks in groups of at most 1152 make two
        groups of 720. A group keeps at least half of its ranks.

        Raises:
          ClusterError: the cluster is too small, or the ranks cannot be spread evenly.
        """
        if ranks > self.ranks:
            raise ClusterError(f"{self.name} has {self.ranks} ranks, got {ranks}")
        levels: list[Level] = []
        below = 1
        for level in self.levels:
            most = min(level.ranks, ranks) // below
            size = next((k for k in range(most, most // 2, -1) if ranks // below % k == 0), 0)
            if size == 0:
                raise ClusterError(
                    f"{self.name}: {ranks} ranks cannot be spread evenly over groups of {level.ranks} "
                    f"(level {level.name})"
                )
            below *= size
            if level.paths:  # a switch of a rail has the uplinks of one rank of each domain
                inner = levels[0].ranks if len(levels) == 2 and levels[1].kind == "rails" else 1
                level = dataclasses.replace(level, sharing=levels[-1].ranks // inner * level.sharers)
            levels.append(dataclasses.replace(level, ranks=below))
            if below == ranks:
                break
        return dataclasses.replace(self, levels=tuple(levels))

    def native(self, channels: int = 1) -> Any:
        """The cluster of the engine, for calls with this number of channels."""
        result = sim.Cluster()
        levels = []
        for number, level in enumerate(self.levels):
            made = sim.Level(level.name, level.kind, level.ranks)
            made.bytes_per_s = level.bytes_per_s
            if number == 0:
                limit = channels * self.channel_bytes_per_s
            else:
                adapters = self.levels[1]
                limit = adapters.bytes_per_s * min(channels / adapters.hashed_planes, 1.0)
            made.flow_bytes_per_s = min(level.flow_bytes_per_s, limit)
            made.overhead_s, made.latency_s, made.taper = level.overhead_s, level.latency_s, level.taper
            if level.paths:
                made.taper *= ecmp.load(level.sharing * channels, level.paths)
            levels.append(made)
        result.levels = levels
        result.own = (*self.copy, 0.0)
        result.memory_bytes_per_s = self.memory_bytes_per_s
        result.launch_s, result.sync_overhead_s = self.launch_s, self.sync_overhead_s
        names = [level.name for level in self.levels]
        links = [f for f in self.faults if f.level in names and not f.planes]
        result.faults = [
            sim.LinkFault(names.index(f.level), f.index, f.out, f.inward, f.capacity, f.latency_s) for f in links
        ]
        result.slow_ranks = [sim.SlowRank(f.index, f.slow) for f in self.faults if not f.level]
        result.concurrent_bytes = channels * sim.CONCURRENT_BYTES  # the kernel runs short moves at once
        return result


def _presets() -> Any:
    return importlib.resources.files("jaxcomm.simulate.cluster") / "presets"
