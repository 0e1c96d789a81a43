"""Reads a cluster from TOML."""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxcomm.simulate.cluster.faults import read as read_faults
from jaxcomm.simulate.cluster.levels import KINDS, Compute, Level
from jaxcomm.simulate.cluster.toml_table import BYTES, FLOPS, RATES, TIMES, ClusterError, Table, parse_number, unknown


def _share(table: Table, key: str, default: float) -> float:
    value = table.figure(key, {}, default)
    if not 0 < value <= 1:
        raise table.error(key, f"got {value:g}, expected more than 0 and at most 1")
    return value


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
        rate = table.figure("bandwidth", RATES) * nics * _share(table, "efficiency", 1.0)
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
        if kind == "fat_tree" and "routing" in table.values:
            routing = table.take("routing", str)
            if routing not in ("spray", "ecmp"):
                raise table.error("routing", f"got {routing!r}, expected spray or ecmp")
            if routing == "ecmp":
                values["paths"] = int(table.figure("paths", {}, least=1.0))
    if kind == "rails" and number != 1:
        raise table.error("kind", f"{kind!r} cannot be level {number + 1}; see docs/internals/simulate.md")
    table.done()
    return Level(name, kind, ranks, **values)


# Where a file is silent. Guesses: shares of large products and of streaming kernels, gaps between kernels of a graph.
_COMPUTE = {"flops_efficiency": 0.7, "hbm_efficiency": 0.8, "kernel_overhead": 1e-6}


def _compute(device: Table) -> Compute | None:
    peak = device.figure("flops_bf16", FLOPS, 0.0)
    of_flops, of_memory = (_share(device, key, _COMPUTE[key]) for key in ("flops_efficiency", "hbm_efficiency"))
    kernel_s = device.figure("kernel_overhead", TIMES, _COMPUTE["kernel_overhead"])
    if not peak:
        return None
    keys = [f"device.{key}" for key in ("flops_bf16", *_COMPUTE)]
    origins = {key: device.origins.get(key, "guess: default of the simulator") for key in keys}
    return Compute(peak, of_flops, of_memory, kernel_s, origins)


def _change(content: dict[str, Any], key: str, value: str, file: str) -> None:
    """Replaces or adds one value of a table. Its origin becomes a guess."""
    path = key.removeprefix("level.").split(".")
    tables = {name: content[name] for name in ("device", "kernel") if isinstance(content.get(name), dict)}
    for row in content.get("level", []):
        tables |= {name: values for name, values in row.items() if isinstance(values, dict)}
    if len(path) != 2 or path[0] not in tables:
        raise ClusterError(f"{file}: {key}: {unknown(key, [f'{name}.KEY' for name in tables])}")
    table, name = tables[path[0]], path[1]
    table[name] = parse_number(value)
    origin = table.get("origin")
    if isinstance(origin, str):
        origin = table["origin"] = dict.fromkeys((k for k in table if k != "origin"), origin)
    if isinstance(origin, dict) and name not in ("ranks", "kind", "routing"):
        origin[name] = "guess: what-if"


_DEVICE = ("kind", "memory", "hbm", "copy", "copy_overhead", "flops_bf16", *_COMPUTE)
_KERNEL = ("launch", "sync", "channels", "channel", "ll", "ll_overhead", "ll_latency")


def _level_keys(number: int, values: Any) -> list[str]:
    """Keys of a level, by its position and kind."""
    kind = values.get("kind") if isinstance(values, dict) else None
    keys = ["ranks", "kind", "latency", "overhead"]
    if number < 2:
        keys += ["bandwidth", "efficiency", "flow", *(("nics", "planes", "routing") if number == 1 else ())]
    else:
        keys += ["taper", *(() if kind == "switch" else ("routing", "paths"))]
    return keys


def parse(text: str, file: str, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of the ``Cluster`` that a TOML text describes. ``file`` is for messages, ``changes`` as in ``load``.

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
    origins: dict[str, str] = {}

    def table(path: str, values: Any, known: Iterable[str]) -> Table:
        return Table(file, path, values, origins, known)

    top = table("", content, ("name", "device", "kernel", "level", "fault"))
    name = top.take("name", str)
    device = table("device", top.take("device", dict), _DEVICE)
    kernel = table("kernel", top.take("kernel", dict), _KERNEL)
    rows = top.take("level", list)
    broken = top.take("fault", list, [])
    figures: dict[str, Any] = {
        "memory_bytes": device.figure("memory", BYTES, math.inf),
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
    kernel.done()
    kind = device.take("kind", str)
    figures["compute"] = _compute(device)
    levels: list[Level] = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or len(row) != 1:
            raise ClusterError(
                f"{file}: level {number + 1}: expected one table with the name of the level, got {row!r}"
            )
        [(level_name, values)] = row.items()
        level = _level(table(level_name, values, _level_keys(number, values)), level_name, number)
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
    if not all(isinstance(text, str) for text in broken):
        raise ClusterError(f'{file}: fault: expected texts such as "leaf[3]=0.5", got {broken!r:.80}')
    found, levels = read_faults(
        [*broken, *added], levels, lambda key, text: ClusterError(f"{file}: fault {key}: {text}")
    )
    return figures | {
        "name": name, "device": kind, "levels": tuple(levels), "origins": origins, "faults": found,
    }  # fmt: skip
