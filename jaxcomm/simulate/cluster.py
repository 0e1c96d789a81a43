"""Clusters: levels of links with the origin of every figure, as TOML files."""

import dataclasses
import importlib.resources
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from jaxcomm._calibrate import Calibration
from jaxcomm._core import plan, sim
from jaxcomm.simulate import hashing
from jaxcomm.simulate.faults import Fault
from jaxcomm.simulate.faults import read as read_faults
from jaxcomm.simulate.figures import FLOPS, RATES, TIMES, ClusterError, Table, unknown

KINDS = ("switch", "mesh", "torus", "rails", "fat_tree", "dragonfly")


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
      name: of the level.
      kind: "switch", "mesh", "torus", "rails", "fat_tree" or "dragonfly" (docs/internals/simulate.md).
      ranks: of one group of this level.
      bytes_per_s: usable bandwidth of one rank and direction: into the domain (first level), of its adapters (second).
      flow_bytes_per_s: limit of one transfer of a rank.
      latency_s: added by this level.
      overhead_s: time that a step occupies the sender, in addition to its bytes.
      planes: networks of the second level.
      hashed_planes: networks of which a thread block uses one at a time; 1 where transfers use all of them.
      taper: bandwidth of the adapters below a group, divided by that of its uplinks.
      paths: equal links of the uplinks of a group, of which each transfer of a thread block takes one (ECMP); 0 if
        transfers are spread over all of them.
      sharing: ranks that share these uplinks, as ``spread`` counts them.
      sharers: groups of ranks that communicate over these uplinks at once; ``spread`` counts the ranks of one.
      shared: the ranks of a group of the first level share the bandwidth of the second.
      valiant: a dragonfly sends through a random third group.
      dims: dimensions of a torus.
    """

    name: str
    kind: str
    ranks: int
    bytes_per_s: float = math.inf
    flow_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    overhead_s: float = 0.0
    planes: int = 1
    hashed_planes: int = 1
    taper: float = 1.0
    paths: int = 0
    sharing: int = 0
    sharers: int = 1
    shared: bool = False
    valiant: bool = False
    dims: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compute:
    """Computation of one device, for ``step``.

    Attributes:
      flops_per_s: peak of products of bfloat16. Other types have a peak in inverse proportion to their size.
      efficiency: share of the peak that products reach.
      memory_efficiency: share of the memory bandwidth that kernels reach.
      kernel_s: start of a kernel.
      origins: origin of each figure.
    """

    flops_per_s: float
    efficiency: float
    memory_efficiency: float
    kernel_s: float
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster of equal devices. ``Cluster.load`` reads one; ``str()`` lists its figures with their origins.

    Attributes:
      name: for messages.
      device: kind of the devices, such as "GB200" or "cpu".
      levels: innermost first.
      memory_bytes_per_s: bandwidth of a device's memory.
      copy: (overhead_s, bytes_per_s) of copies inside a device.
      launch_s, sync_overhead_s: start of a call, and synchronization of all ranks before and after it.
      channels: most thread blocks of a call.
      channel_bytes_per_s: limit of one thread block.
      ll: (overhead_s, bytes_per_s, latency_s) of LL messages; None: the cluster has none.
      scope: on CPUs "process", "node" or "network"; None on GPUs.
      ranks_per_processor: ranks that take turns on one processor.
      origins: origin of each figure, by "table.key".
      errors: measured / predicted - 1 of the calibration that the figures come from.
      compute: computation of a device; None if the file has no ``flops_bf16``.
      faults: degraded and lost links, planes and ranks, and slow ranks.
    """

    name: str
    device: str
    levels: tuple[Level, ...]
    memory_bytes_per_s: float = math.inf
    copy: tuple[float, float] = (0.0, math.inf)
    launch_s: float = 0.0
    sync_overhead_s: float = 0.0
    channels: int = 1
    channel_bytes_per_s: float = math.inf
    ll: tuple[float, float, float] | None = None
    scope: str | None = None
    ranks_per_processor: float = 1.0
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    errors: tuple[float, ...] = ()
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
        return sorted(path.name.removesuffix(".toml") for path in _library().iterdir() if path.name.endswith(".toml"))

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
            return parse((_library() / f"{text}.toml").read_text(encoding="utf-8"), text, changes or {})
        if not text.endswith(".toml") and not pathlib.Path(text).exists():
            raise ClusterError(f"cluster {text!r} is neither a file nor one of {', '.join(Cluster.names())}")
        return parse(pathlib.Path(text).read_text(encoding="utf-8"), text, changes or {})

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
            whole = level.kind in ("torus", "mesh")
            if size == 0 or (whole and ranks > level.ranks and size * below < level.ranks):
                raise ClusterError(
                    f"{self.name}: {ranks} ranks cannot be spread evenly over groups of {level.ranks} "
                    f"(level {level.name})"
                )
            below *= size
            if level.paths:  # a switch of a rail has the uplinks of one rank of each domain
                inner = levels[0].ranks if len(levels) == 2 and levels[1].kind == "rails" else 1
                level = dataclasses.replace(level, sharing=levels[-1].ranks // inner * level.sharers)
            levels.append(level if whole else dataclasses.replace(level, ranks=below))
            if below == ranks:
                break
        return dataclasses.replace(self, levels=tuple(levels))

    @staticmethod
    def here(calibration: Calibration | None = None) -> "Cluster":
        """The CPU devices of this program, with the parameters of the cost model. All processes must call it.

        Args:
          calibration: result of ``calibrate()``; its errors become the band of predictions.
        """
        # Only here: the others need no devices.
        from jaxcomm._topology import topology

        found = topology()
        n, per_node = sum(found.ranks), max(found.ranks)
        scope = "process" if sum(map(len, found.nodes)) == 1 else "node" if len(found.nodes) == 1 else "network"
        origin = "measured: calibrate()" if found.calibrated else "guess: constants of the cost model"
        errors = (
            [c.measured_s / c.predicted_s - 1 for c in calibration.cells if c.scope == scope] if calibration else []
        )
        machine = plan.machine_of(scope, n, per_node)
        return Cluster.of_machine(machine, scope, n, per_node, origin, tuple(errors))

    @staticmethod
    def of_machine(
        machine: Any, scope: str, ranks: int, ranks_per_node: int, origin: str, errors: tuple[float, ...] = ()
    ) -> "Cluster":
        """CPU devices with the parameters of a machine of the cost model. ``here`` has the scopes."""
        rows = {name: (overhead_s, rate, latency_s) for name, overhead_s, rate, latency_s in machine.links}
        overhead_s, rate, latency_s = rows["node"]
        levels = [
            Level("node", "switch", ranks_per_node, flow_bytes_per_s=rate, latency_s=latency_s, overhead_s=overhead_s)
        ]
        if ranks > ranks_per_node:
            overhead_s, rate, latency_s = rows["network"]
            shared = machine.shared_network
            levels.append(
                Level(
                    "network", "fat_tree", ranks, rate if shared else math.inf, rate, latency_s, overhead_s,
                    shared=shared,
                )
            )  # fmt: skip
        return Cluster(
            "this machine",
            "cpu",
            tuple(levels),
            copy=rows["self"][:2],
            launch_s=machine.launch_s,
            sync_overhead_s=machine.sync_overhead_s,
            scope=scope,
            ranks_per_processor=machine.ranks_per_processor,
            origins={f"{name}.{key}": origin for name in rows for key in ("overhead", "bandwidth", "latency")},
            errors=errors,
        )

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
                made.taper *= hashing.load(level.sharing * channels, level.paths)
            made.shared, made.valiant, made.dims = level.shared, level.valiant, list(level.dims)
            levels.append(made)
        result.levels = levels
        result.own = (*self.copy, 0.0)
        result.memory_bytes_per_s = self.memory_bytes_per_s
        result.launch_s, result.sync_overhead_s = self.launch_s, self.sync_overhead_s
        result.ranks_per_processor = self.ranks_per_processor
        names = [level.name for level in self.levels]
        links = [f for f in self.faults if f.level in names and not f.planes]
        result.faults = [
            sim.LinkFault(names.index(f.level), f.index, f.out, f.inward, f.capacity, f.latency_s) for f in links
        ]
        result.slow_ranks = [sim.SlowRank(f.index, f.slow) for f in self.faults if not f.level]
        if self.scope is None:  # the kernel runs short moves at once
            result.together_bytes = channels * sim.TOGETHER_BYTES
        return result


def _library() -> Any:
    return importlib.resources.files("jaxcomm.simulate") / "clusters"


def _level(table: Table, name: str, number: int) -> Level:
    ranks = table.take("ranks", int)
    kind = table.take("kind", str)
    if ranks < 1:
        raise table.error("ranks", f"got {ranks}, expected at least 1")
    if kind not in KINDS:
        raise table.error("kind", f"got {kind!r}, expected one of {', '.join(KINDS)}")
    values: dict[str, Any] = {"latency_s": table.figure("latency", TIMES)}
    if number < 2:
        nics = table.figure("nics", {}, 1.0, 1.0) if number == 1 else 1.0
        rate = table.figure("bandwidth", RATES) * nics * table.figure("efficiency", {}, 1.0)
        values |= {"bytes_per_s": rate, "overhead_s": table.figure("overhead", TIMES, 0.0)}
        if "flow" in table.values:
            values["flow_bytes_per_s"] = table.figure("flow", RATES)
        if number == 1 and "planes" in table.values:
            planes = table.figure("planes", {}, 1.0, 1.0)
            routing = table.take("routing", str, "spray")
            if routing not in ("spray", "hash"):
                raise table.error("routing", f"got {routing!r}, expected spray or hash")
            values["planes"] = int(planes)
            if routing == "hash":
                values["hashed_planes"] = int(planes)
    else:
        values |= {"taper": table.figure("taper", {}, 1.0), "overhead_s": table.figure("overhead", TIMES, 0.0)}
        if values["taper"] <= 0:
            raise table.error("taper", "got 0, expected more than 0")
        if kind == "dragonfly":
            routing = table.take("routing", str, "minimal")
            if routing not in ("minimal", "valiant"):
                raise table.error("routing", f"got {routing!r}, expected minimal or valiant")
            values["valiant"] = routing == "valiant"
        elif kind == "fat_tree" and "routing" in table.values:
            routing = table.take("routing", str)
            if routing not in ("spray", "ecmp"):
                raise table.error("routing", f"got {routing!r}, expected spray or ecmp")
            if routing == "ecmp":
                values["paths"] = int(table.figure("paths", {}, least=1.0))
    if kind == "torus":
        dims = table.take("dims", list)
        if not all(isinstance(size, int) and size > 0 for size in dims) or math.prod(dims) != ranks:
            raise table.error("dims", f"got {dims!r}, expected positive integers with the product {ranks}")
        values["dims"] = tuple(dims)
    places = {"mesh": number == 0, "torus": number == 0, "rails": number == 1, "dragonfly": number > 1}
    if not places.get(kind, True):
        raise table.error("kind", f"{kind!r} cannot be level {number + 1}; see docs/internals/simulate.md")
    table.done()
    return Level(name, kind, ranks, **values)


# Where a file is silent. Guesses: shares of large products and of streaming kernels, gaps between kernels of a graph.
_COMPUTE = {"flops_efficiency": 0.7, "hbm_efficiency": 0.8, "kernel_overhead": 1e-6}


def _compute(device: Table) -> Compute | None:
    peak = device.figure("flops_bf16", FLOPS, 0.0)
    units: dict[str, Mapping[str, float]] = {"kernel_overhead": TIMES}
    values = {key: device.figure(key, units.get(key, {}), default) for key, default in _COMPUTE.items()}
    for key in ("flops_efficiency", "hbm_efficiency"):
        if not 0 < values[key] <= 1:
            raise device.error(key, f"got {values[key]:g}, expected more than 0 and at most 1")
    if not peak:
        return None
    keys = ("flops_bf16", *_COMPUTE)
    origins = {key: device.origins.get(f"device.{key}", "guess: default of the simulator") for key in keys}
    return Compute(peak, values["flops_efficiency"], values["hbm_efficiency"], values["kernel_overhead"], origins)


def _change(content: dict[str, Any], key: str, value: str, file: str) -> None:
    """Replaces or adds one value of a table. Its origin becomes a guess."""
    path = key.removeprefix("level.").split(".")
    tables = {name: content[name] for name in ("device", "kernel") if isinstance(content.get(name), dict)}
    for row in content.get("level", []):
        tables |= {name: values for name, values in row.items() if isinstance(values, dict)}
    if len(path) != 2 or path[0] not in tables:
        raise ClusterError(f"{file}: {key}: {unknown(key, [f'{name}.KEY' for name in tables])}")
    table, name = tables[path[0]], path[1]
    try:
        number: Any = float(value)
    except ValueError:
        number = value
    else:
        number = int(number) if number.is_integer() else number
    words = {"true": True, "false": False}
    table[name] = words.get(value, number)
    origin = table.get("origin")
    if isinstance(origin, str):
        origin = table["origin"] = dict.fromkeys((k for k in table if k != "origin"), origin)
    if isinstance(origin, dict) and name not in ("ranks", "kind", "routing", "dims"):
        origin[name] = "guess: what-if"


_TOP = ("name", "device", "kernel", "level", "fault")
_DEVICE = ("kind", "hbm", "copy", "copy_overhead", "flops_bf16", *_COMPUTE)
_KERNEL = ("launch", "sync", "channels", "channel", "ll", "ll_overhead", "ll_latency")


def _level_keys(number: int, kind: Any) -> list[str]:
    """Keys of a level, by its position and kind."""
    keys = ["ranks", "kind", "latency", "overhead"]
    if number < 2:
        keys += ["bandwidth", "efficiency", "flow", *(("nics", "planes", "routing") if number == 1 else ())]
    else:
        keys += ["taper", *(() if kind in ("switch", "torus") else ("routing", "paths"))]
    return keys if kind in KINDS and kind != "torus" else [*keys, "dims"]


def _check_keys(content: dict[str, Any], file: str) -> None:
    """Refuses unknown keys of all tables: a key that is written wrongly is missing too."""
    Table(file, "", content, {}).only(_TOP)
    for name, known in (("device", _DEVICE), ("kernel", _KERNEL)):
        if isinstance(content.get(name), dict):
            Table(file, name, content[name], {}).only(known)
    rows = content.get("level")
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        for name, values in row.items() if isinstance(row, dict) and len(row) == 1 else ():
            if isinstance(values, dict):
                Table(file, name, values, {}).only(_level_keys(number, values.get("kind")))


def parse(text: str, file: str, changes: Mapping[str, str] | None = None) -> Cluster:
    """The cluster that a TOML text describes. ``file`` is for messages, ``changes`` as in ``Cluster.load``.

    Raises:
      ClusterError: see ``Cluster.load``.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{file}: {error}") from None
    added = []
    for key, changed in (changes or {}).items():
        if key.startswith("fault."):
            added.append(f"{key.removeprefix('fault.')}={changed}")
        else:
            _change(content, key, changed, file)
    _check_keys(content, file)
    origins: dict[str, str] = {}

    def table(path: str, values: Any) -> Table:
        return Table(file, path, values, origins)

    top = table("", content)
    name = top.take("name", str)
    device = table("device", top.take("device", dict))
    kernel = table("kernel", top.take("kernel", dict))
    rows = top.take("level", list)
    broken = top.take("fault", list, [])
    top.done()
    figures: dict[str, Any] = {
        "memory_bytes_per_s": device.figure("hbm", RATES),
        "copy": (device.figure("copy_overhead", TIMES), device.figure("copy", RATES)),
        "launch_s": kernel.figure("launch", TIMES),
        "sync_overhead_s": kernel.figure("sync", TIMES),
        "channels": int(kernel.figure("channels", {}, least=1.0)),
        "channel_bytes_per_s": kernel.figure("channel", RATES),
    }
    if "ll" in kernel.values:
        figures["ll"] = (
            kernel.figure("ll_overhead", TIMES),
            kernel.figure("ll", RATES),
            kernel.figure("ll_latency", TIMES),
        )
    kind = device.take("kind", str)
    figures["compute"] = _compute(device)
    device.done()
    kernel.done()
    levels: list[Level] = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or len(row) != 1:
            raise ClusterError(
                f"{file}: level {number + 1}: expected one table with the name of the level, got {row!r}"
            )
        [(level_name, values)] = row.items()
        level = _level(table(level_name, values), level_name, number)
        if levels and level.ranks % levels[-1].ranks:
            raise ClusterError(
                f"{file}: {level_name}.ranks: {level.ranks} is not a multiple of the {levels[-1].ranks} ranks of "
                f"{levels[-1].name}"
            )
        if number > 1:  # transfers over a higher level pass the adapters too
            flow = min(level.flow_bytes_per_s, levels[-1].flow_bytes_per_s)
            overhead = level.overhead_s or levels[-1].overhead_s
            level = dataclasses.replace(level, flow_bytes_per_s=flow, overhead_s=overhead)
        levels.append(level)
    if not levels:
        raise ClusterError(f"{file}: level: needs at least one")
    found, levels = read_faults(broken, added, levels, lambda key, text: ClusterError(f"{file}: {key}: {text}"))
    return Cluster(name, kind, tuple(levels), origins=origins, faults=found, **figures)
