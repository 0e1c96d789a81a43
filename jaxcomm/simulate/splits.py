"""Splits of a table into rows to fit and rows to judge, with fixed seeds."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from jaxcomm.simulate import hardware
from jaxcomm.simulate.table import Table

SEED = 16
_DENSE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Part:
    """One fit and what it is judged by: masks over the rows of the table."""

    split: str
    name: str
    train: np.ndarray
    test: np.ndarray


def _families(table: Table) -> dict[tuple[str, str], np.ndarray]:
    """Rows of one harness on one kind of network. GB200 and GB300 count as one sample."""
    names = np.array(["\0".join((row.repo, row.interconnect)) for row in table.rows], dtype=object)
    found = {}
    for name in sorted(set(names)):
        repo, interconnect = name.split("\0")
        found[repo, interconnect] = names == name
    return found


def interpolation(table: Table, seed: int = SEED, share: float = 0.2) -> Iterator[Part]:
    """I: random points of every series with five or more."""
    found = defaultdict(list)
    for i, row in enumerate(table.rows):
        found[row.series].append(i)
    random = np.random.default_rng(seed)
    test = np.zeros(len(table), bool)
    for series in sorted(found):
        index = found[series]
        if len(index) >= 5:
            test[random.permutation(index)[: max(1, round(share * len(index)))]] = True
    yield Part("I", "random points", ~test, test)


def scale(table: Table) -> Iterator[Part]:
    """N: each number of ranks of a family with three or more."""
    ranks = np.array([row.ranks for row in table.rows])
    for (repo, interconnect), family in _families(table).items():
        scales = sorted(set(ranks[family]))
        for n in scales if len(scales) >= 3 else []:
            test = family & (ranks == n)
            yield Part("N", f"{repo}, {interconnect}, {n} ranks", ~test, test)


def extrapolation(table: Table) -> Iterator[Part]:
    """X: 64 and 72 ranks of an NVL72 domain from at most 18."""
    ranks = np.array([row.ranks for row in table.rows])
    for (repo, interconnect), family in _families(table).items():
        test, small = family & (ranks >= 64), family & (ranks <= 18)
        if "domain" in interconnect and test.any() and small.any() and _dense(table)[test].any():
            yield Part("X", f"{repo}, {interconnect}", ~family | small, test)


def _dense(table: Table) -> np.ndarray:
    return np.array([row.op in _DENSE for row in table.rows], bool)


def op(table: Table) -> Iterator[Part]:
    """O: each op of a family that has three or more."""
    ops = np.array([row.op for row in table.rows], dtype=object)
    for (repo, interconnect), family in _families(table).items():
        present = [o for o in _DENSE if (family & (ops == o)).any()]
        for name in present if len(present) >= 3 else []:
            test = family & (ops == name)
            yield Part("O", f"{repo}, {interconnect}, {name}", ~test, test)


def system(table: Table, points: int = 0) -> Iterator[Part]:
    """S: all rows of a switched family with four ops or more, and of sister devices, wherever they were measured.

    `points` = 6 keeps 2 sizes of 3 ops at 8 ranks.
    """
    kinds = [hardware.device(row.hardware) for row in table.rows]
    names = np.array([k.name if k else "" for k in kinds], dtype=object)
    switched = np.array([k is not None and k.kind == "switch" for k in kinds], bool)
    ops = np.array([row.op for row in table.rows], dtype=object)
    for (repo, _), family in _families(table).items():
        if len(set(ops[family & _dense(table)])) < 4 or not switched[family].all():
            continue
        devices = sorted(set(names[family]))
        gone = np.isin(names, sorted({s for d in devices for s in hardware.sisters(d)}))
        kept = np.zeros(len(table), bool)
        if points:
            kept[_few(table, family & (names == devices[0]))] = True
        yield Part(f"S{points}", f"{repo}, {', '.join(devices)}", ~gone | kept, family & ~kept)


def _few(table: Table, rows: np.ndarray) -> list[int]:
    """The points nearest to 1 MiB and 256 MiB of all_reduce, all_gather and all_to_all on 8 ranks."""
    chosen: list[int] = []
    for name in ("all_reduce", "all_gather", "all_to_all"):
        index = [i for i in np.flatnonzero(rows) if table.rows[i].op == name and table.rows[i].ranks == 8]
        for size in (2.0**20, 2.0**28):
            distance = [abs(np.log(table.rows[i].size / size)) for i in index]
            chosen.append(int(index[int(np.argmin(distance))]))
    return chosen


def harness(table: Table) -> Iterator[Part]:
    """H: all_reduce on 8 ranks by each harness whose device others have measured too."""
    kinds = [hardware.device(row.hardware) for row in table.rows]
    names = np.array([k.name if k else "" for k in kinds], dtype=object)
    repos = np.array([row.repo for row in table.rows], dtype=object)
    wanted = np.array(
        [r.op == "all_reduce" and r.ranks == 8 and r.library.startswith("NCCL") for r in table.rows], bool
    )
    wanted &= np.array(["device API" not in row.library and "timing=CUDA" not in row.notes for row in table.rows], bool)
    for repo in sorted(set(repos[wanted])):
        for device in sorted(set(names[wanted & (repos == repo)])):
            mine = (repos == repo) & (names == device)
            if (wanted & (names == device) & ~mine).any():
                yield Part("H", f"{repo}, {device}", ~mine, mine & wanted)
