"""Faults of a cluster: degraded and lost links, planes and ranks, and slow ranks.

A fault is a table of the TOML file, or a text such as "leaf[3]=0.5" on the command line.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcomm.simulate.cluster.toml_table import parse_number, unknown

_DIRECTIONS = {"": (True, True), "out": (True, False), "up": (True, False), "in": (False, True), "down": (False, True)}
_KEYS = {
    "link": {"link", "capacity"},
    "plane": {"plane", "lost"},
    "rank": {"rank", "slow", "lost"},
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      level: name of the level of the link or the planes; "" for a rank.
      index: rank, or group of the level below; -1 for planes.
      out, inward: directions of the link.
      capacity: share of the link's bandwidth that is left; 0 for a lost one.
      slow: factor on the time of a rank's own steps; 0 for a lost rank.
      planes: lost planes of the level.
      latency_s: added to transfers over an adapter: the hop to a relay outside of the group.
    """

    level: str = ""
    index: int = -1
    out: bool = True
    inward: bool = True
    capacity: float = 1.0
    slow: float = 1.0
    planes: int = 0
    latency_s: float = 0.0

    def __str__(self) -> str:
        if self.planes:
            return f"{self.level}: {self.planes} plane(s) lost"
        if not self.level:
            return f"rank {self.index} lost" if self.slow == 0 else f"rank {self.index} {self.slow:g} times as slow"
        way = {(True, False): ".out", (False, True): ".in"}.get((self.out, self.inward), "")
        left = "lost" if self.capacity == 0 else f"with {self.capacity:g} of its bandwidth"
        return f"{self.level}[{self.index}]{way} {left}"


Error = Callable[[str, str], ValueError]


def table(values: Mapping[str, Any], levels: Sequence[str], error: Error) -> Fault:
    """The fault of a TOML table. `error(key, text)` makes the exception."""
    every = set().union(*_KEYS.values())
    for key in values:
        if key not in every:
            raise error(key, unknown(key, every))
    kinds = [kind for kind in _KEYS if kind in values]
    if len(kinds) != 1:
        raise error("", f"needs exactly one of the keys {', '.join(_KEYS)}, got {', '.join(values) or 'none'}")
    [kind] = kinds
    for key in values:
        if key not in _KEYS[kind]:
            raise error(key, f"unknown key; a fault with {kind} has {', '.join(sorted(_KEYS[kind]))}")

    def figure(key: str, least: float, most: float, words: str) -> float:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < most:
            raise error(key, f"got {value!r}, expected {words}")
        return float(value)

    def level(name: Any, key: str) -> str:
        if name not in levels:
            raise error(key, f"got {name!r}, expected one of the levels {', '.join(levels)}")
        return str(name)

    if kind == "plane":
        lost = figure("lost", 1, math.inf, "the number of lost planes")
        if lost != int(lost):
            raise error("lost", f"got {lost:g}, expected the number of lost planes")
        return Fault(level(values["plane"], "plane"), planes=int(lost))
    if kind == "rank":
        index = int(figure("rank", 0, math.inf, "a rank"))
        if ("slow" in values) == ("lost" in values):
            raise error("rank", "needs either slow = FACTOR or lost = true")
        if "lost" in values:
            if values["lost"] is not True:
                raise error("lost", f"got {values['lost']!r}, expected true")
            return Fault(index=index, slow=0.0)
        return Fault(index=index, slow=figure("slow", 1, math.inf, "a factor of at least 1"))
    found = re.fullmatch(r"([^\[\]]+)\[(\d+)\](?:\.(out|in|up|down))?", str(values["link"]))
    if not found:
        raise error("link", f"got {values['link']!r}, expected LEVEL[INDEX], with .out or .in for one direction")
    out, inward = _DIRECTIONS[found[3] or ""]
    capacity = figure("capacity", 0, 1, "a share from 0 (lost) to less than 1")
    return Fault(level(found[1], "link"), int(found[2]), out, inward, capacity)


def parse(given: str, levels: Sequence[str], error: Error) -> Fault:
    """The fault of "leaf[3]=0.5", "leaf[3].out=0.5", "leaf.planes=1", "rank[7]=1.5" or "rank[7]=lost"."""
    key, equals, text = (part.strip() for part in given.partition("="))
    value = parse_number(text)
    if not equals or (isinstance(value, str) and value != "lost"):
        raise error(given, "expected LEVEL[INDEX]=SHARE, LEVEL.planes=LOST, rank[INDEX]=FACTOR or rank[INDEX]=lost")
    rank = re.fullmatch(r"rank\[(\d+)\]", key)
    values: dict[str, Any]
    if rank and "rank" not in levels:
        values = {"rank": int(rank[1])} | ({"lost": True} if value == "lost" else {"slow": value})
    elif key.endswith(".planes"):
        values = {"plane": key.removesuffix(".planes"), "lost": value}
    else:
        values = {"link": key, "capacity": 0 if value == "lost" else value}
    return table(values, levels, lambda _, problem: error(given, problem))


def check(faults: Sequence[Fault], error: Error) -> None:
    """Refuses faults that contradict each other."""
    lost = {fault.index for fault in faults if fault.slow == 0}
    seen: set[tuple[Any, ...]] = set()
    for number, fault in enumerate(faults):
        place = f"fault {number + 1} ({fault})"
        keys = [(fault.level, fault.index, way) for way in (0, 1) if (fault.out, fault.inward)[way]]
        if any(key in seen for key in keys):
            raise error(place, "contradicts an earlier fault of the same place")
        seen.update(keys)
        if fault.level and not fault.planes and lost:
            raise error(place, "contradicts the loss of a rank, after which the others have new numbers")


def read(
    rows: Sequence[Any], added: Sequence[str], levels: list[Any], error: Error
) -> tuple[tuple[Fault, ...], list[Any]]:
    """The faults of the tables of a file and of a command line, and the levels without lost planes."""
    names = [level.name for level in levels]
    found: list[Fault] = []
    for number, row in enumerate(rows):
        place = f"fault {number + 1}"
        if not isinstance(row, dict):
            raise error(place, f"must be a table, got {row!r}")

        def of_row(key: str, problem: str, place: str = place) -> ValueError:
            return error(f"{place}.{key}".rstrip("."), problem)

        found.append(table(row, names, of_row))
    found += [parse(row, names, lambda key, problem: error(f"--fault {key}", problem)) for row in added]
    check(found, error)
    for fault in found:
        if not fault.planes:
            continue
        number = names.index(fault.level)
        level, left = levels[number], levels[number].planes - fault.planes
        if left < 1:
            raise error(str(fault), f"level {fault.level} has {level.planes} plane(s), and one must be left")
        rate = level.bytes_per_s * left / level.planes
        hashed = left if level.hashed_planes > 1 else 1
        levels[number] = dataclasses.replace(level, bytes_per_s=rate, planes=left, hashed_planes=hashed)
    return tuple(found), levels


def survive(faults: Sequence[Fault], ranks: int, ranks_per_domain: int) -> tuple[int, tuple[Fault, ...]]:
    """The ranks of a group of `ranks` that go on after losses, and the faults in their numbering.

    A group inside a domain loses the ranks. Of several domains, those with a lost rank leave.

    Raises:
      ValueError: no rank is left.
    """
    size = 1 if ranks <= ranks_per_domain else ranks_per_domain
    lost = {fault.index // size for fault in faults if fault.slow == 0 and fault.index < ranks}
    if not lost:
        return ranks, tuple(fault for fault in faults if fault.slow)
    left = ranks - size * len(lost)
    if left < 1:
        raise ValueError("all ranks are lost")
    kept = []
    for fault in faults:
        if fault.slow == 0 or fault.index // size in lost:
            continue
        before = sum(unit < fault.index // size for unit in lost)
        kept.append(fault if fault.planes else dataclasses.replace(fault, index=fault.index - size * before))
    return left, tuple(kept)
