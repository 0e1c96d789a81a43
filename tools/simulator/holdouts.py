"""Named hold-outs: which rows of a table a fit trains on, which it predicts, and the errors of these."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxcomm.simulate.nccl import hardware
from tools.simulator import forms, measured, systems
from tools.simulator import rows as table_rows
from tools.simulator.fit import Cache, fit
from tools.simulator.model import Model
from tools.simulator.table import Table

SEED = 16
_DENSE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Part:
    """One fit: masks over the rows of the table that it trains on, and that it predicts."""

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


def random_points(table: Table, seed: int = SEED, share: float = 0.2) -> Iterator[Part]:
    """Random points of every series with five or more."""
    found = defaultdict(list)
    for i, row in enumerate(table.rows):
        found[measured.series(row)].append(i)
    random = np.random.default_rng(seed)
    test = np.zeros(len(table), bool)
    for series in sorted(found):
        index = found[series]
        if len(index) >= 5:
            test[random.permutation(index)[: max(1, round(share * len(index)))]] = True
    yield Part("random points", ~test, test)


def one_scale(table: Table) -> Iterator[Part]:
    """Each number of ranks of a family with three or more."""
    ranks = np.array([row.ranks for row in table.rows])
    for (repo, interconnect), family in _families(table).items():
        scales = sorted(set(ranks[family]))
        for n in scales if len(scales) >= 3 else []:
            test = family & (ranks == n)
            yield Part(f"{repo}, {interconnect}, {n} ranks", ~test, test)


def larger_scales(table: Table) -> Iterator[Part]:
    """64 and 72 ranks of an NVL72 domain, from at most 18."""
    ranks = np.array([row.ranks for row in table.rows])
    for (repo, interconnect), family in _families(table).items():
        test, small = family & (ranks >= 64), family & (ranks <= 18)
        if "domain" in interconnect and test.any() and small.any() and _dense(table)[test].any():
            yield Part(f"{repo}, {interconnect}", ~family | small, test)


def _dense(table: Table) -> np.ndarray:
    return np.array([row.op in _DENSE for row in table.rows], bool)


def one_operation(table: Table) -> Iterator[Part]:
    """Each op of a family that has three or more."""
    ops = np.array([row.op for row in table.rows], dtype=object)
    for (repo, interconnect), family in _families(table).items():
        present = [o for o in _DENSE if (family & (ops == o)).any()]
        for name in present if len(present) >= 3 else []:
            test = family & (ops == name)
            yield Part(f"{repo}, {interconnect}, {name}", ~test, test)


def one_system(table: Table, keep_points: bool = False) -> Iterator[Part]:
    """All rows of a switched family with four ops or more, and those of its sister devices by other harnesses.

    With `keep_points`, the fit trains on six points of the family: 2 sizes of 3 ops at 8 ranks.
    """
    kinds = [hardware.device(row.hardware) for row in table.rows]
    names = np.array([k.name if k else "" for k in kinds], dtype=object)
    switched = np.array([k is not None and k.kind == "switch" for k in kinds], bool)
    ops = np.array([row.op for row in table.rows], dtype=object)
    for (repo, _), family in _families(table).items():
        if len(set(ops[family & _dense(table)])) < 4 or not switched[family].all():
            continue
        devices = sorted(set(names[family]))
        gone = np.isin(names, sorted({s for d in devices for s in systems.sisters(d)}))
        kept = np.zeros(len(table), bool)
        if keep_points:
            kept[_few(table, family & (names == devices[0]))] = True
        yield Part(f"{repo}, {', '.join(devices)}", ~gone | kept, family & ~kept)


def _few(table: Table, rows: np.ndarray) -> list[int]:
    """The points nearest to 1 MiB and 256 MiB of all_reduce, all_gather and all_to_all on 8 ranks."""
    chosen: list[int] = []
    for name in ("all_reduce", "all_gather", "all_to_all"):
        index = [i for i in np.flatnonzero(rows) if table.rows[i].op == name and table.rows[i].ranks == 8]
        for size in (2.0**20, 2.0**28):
            distance = [abs(np.log(table.rows[i].size / size)) for i in index]
            chosen.append(int(index[int(np.argmin(distance))]))
    return chosen


def one_harness(table: Table) -> Iterator[Part]:
    """all_reduce on 8 ranks of each harness whose device another harness has measured too."""
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
                yield Part(f"{repo}, {device}", ~mine, mine & wanted)


HOLD_OUTS: dict[str, Callable[[Table], Iterator[Part]]] = {
    "points": random_points,
    "scale": one_scale,
    "larger": larger_scales,
    "operation": one_operation,
    "system": one_system,
    "system-6-points": functools.partial(one_system, keep_points=True),
    "harness": one_harness,
}


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The predicted rows of all parts of a hold-out; errors are logarithms of measured over predicted time."""

    name: str
    index: np.ndarray  # row of the table
    part: np.ndarray
    error: np.ndarray
    plan_error: np.ndarray  # of the plan model alone
    evidence: np.ndarray
    deviation: np.ndarray
    calibration: tuple[np.ndarray, ...]  # of `points`: its training rows, each predicted from all others

    def __len__(self) -> int:
        return len(self.index)


def predict(table: Table, name: str, cache: Cache | None = None) -> HeldOut:
    """Fits the training rows of a hold-out of a table of measured rows, and predicts the others."""
    log_time = np.log(measured.times(table))
    _, keys = forms.describe(table, table_rows.features(table))
    columns: list[list[np.ndarray]] = [[], [], [], [], [], []]
    calibration: tuple[np.ndarray, ...] = ()
    for number, each in enumerate(HOLD_OUTS[name](table)):
        rows = np.flatnonzero(each.test)
        # Other hold-outs predict from near systems as well, so all systems are fitted in full.
        wanted = {keys[i] for i in rows} if name in ("scale", "larger", "operation") else None
        fitted = fit(measured.select(table, each.train), cache, wanted)
        test = measured.select(table, each.test)
        found = fitted.predict(test)
        plan = fitted.predict(test, use_residual=False)
        known = np.isfinite(found.log_time)
        values = (
            rows,
            np.full(len(rows), number),
            log_time[rows] - found.log_time,
            log_time[rows] - plan.log_time,
            found.evidence,
            found.deviation,
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value[known])
        if name == "points":
            calibration = leave_one_out(fitted)
    index, part, error, plan_error, evidence, deviation = (np.concatenate(c) if c else np.zeros(0) for c in columns)
    return HeldOut(name, index.astype(int), part, error, plan_error, evidence, deviation, calibration)


def leave_one_out(fitted: Model) -> tuple[np.ndarray, ...]:
    """Error, deviation, size and evidence of each fitted point, predicted from all others in closed form."""
    residual = fitted.residual
    knots = residual.knots
    error, deviation = np.zeros(len(residual.values)), np.zeros(len(residual.values))
    for key, index in residual.index.items():
        block = residual.block(key)
        assert block is not None
        diagonal = np.diag(block.inverse)
        error[index] = block.weights / diagonal
        deviation[index] = 1 / np.sqrt(diagonal)
    ends: dict[tuple[Any, ...], tuple[float, float]] = {}
    for series, size in zip(knots.series(), knots.size, strict=True):
        low, high = ends.get(series, (np.inf, 0.0))
        ends[series] = (min(low, size), max(high, size))
    inside = [ends[k][0] < s < ends[k][1] for k, s in zip(knots.series(), knots.size, strict=True)]
    return error, deviation, knots.size, np.where(inside, "between", "beyond")
