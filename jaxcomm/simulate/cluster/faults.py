"""Faults of a cluster: degraded and lost links, planes and ranks, and slow ranks.

A fault is a text such as "leaf[3]=0.5", in the TOML file or on the command line.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxcomm.simulate.cluster.toml_table import parse_number

_DIRECTIONS = {"": (True, True), "out": (True, False), "up": (True, False), "in": (False, True), "down": (False, True)}


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
_TEXT = re.compile(r"\s*([^\[\]=.]+)(?:\[(\d+)\](?:\.(out|in|up|down))?|(\.planes))\s*=\s*(\S+)\s*")
_EXPECTED = "expected LEVEL[INDEX]=SHARE, LEVEL.planes=LOST, rank[INDEX]=FACTOR or rank[INDEX]=lost"


def parse(given: str, levels: Sequence[str], error: Error) -> Fault:
    """The fault of "leaf[3]=0.5", "leaf[3].out=0.5", "leaf.planes=1", "rank[7]=1.5" or "rank[7]=lost".

    `error(key, text)` makes the exception.
    """
    found = _TEXT.fullmatch(given)
    lost = found is not None and found[5] == "lost"
    value = parse_number(found[5]) if found and not lost else 0
    if not found or isinstance(value, str) or not 0 <= value < math.inf:
        raise error(given, _EXPECTED)
    name, index = found[1], int(found[2] or -1)
    if name == "rank" and name not in levels:
        if found[3] or found[4] or (not lost and value < 1):
            raise error(given, "expected rank[INDEX]=FACTOR with a factor of at least 1, or rank[INDEX]=lost")
        return Fault(index=index, slow=float(value))
    if name not in levels:
        raise error(given, f"got {name!r}, expected one of the levels {', '.join(levels)}")
    if found[4]:
        if not isinstance(value, int) or value < 1:
            raise error(given, f"got {value}, expected the number of lost planes")
        return Fault(name, planes=value)
    if value >= 1:
        raise error(given, f"got {value:g}, expected a share from 0 (lost) to less than 1")
    return Fault(name, index, *_DIRECTIONS[found[3] or ""], float(value))


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


def read(given: Sequence[str], levels: list[Any], error: Error) -> tuple[tuple[Fault, ...], list[Any]]:
    """The faults of these texts, and the levels without lost planes."""
    names = [level.name for level in levels]
    found = [parse(text, names, error) for text in given]
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
