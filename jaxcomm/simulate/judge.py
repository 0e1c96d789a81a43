"""Fits the training part of each split and predicts the rest."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxcomm.simulate import model, query, splits, systems
from jaxcomm.simulate.table import Table

SPLITS: dict[str, Callable[[Table], Iterator[splits.Part]]] = {
    "I": splits.interpolation,
    "N": splits.scale,
    "X": splits.extrapolation,
    "O": splits.op,
    "S0": splits.system,
    "S6": functools.partial(splits.system, points=6),
    "H": splits.harness,
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """The test rows of all parts of one split; errors are logarithms of measured over predicted time."""

    split: str
    index: np.ndarray  # row of the table
    part: np.ndarray
    error: np.ndarray
    plan_error: np.ndarray  # of the plan model alone
    basis: np.ndarray
    deviation: np.ndarray
    calibration: tuple[np.ndarray, ...]  # of the last part: leave-one-out of its training rows

    def __len__(self) -> int:
        return len(self.index)


def judge(table: Table, name: str, cache: systems.Cache | None = None) -> Judged:
    """Runs one split of a table of measured rows."""
    log_time = np.log(table.times())
    _, keys = systems.describe(table, query.build(table))
    columns: list[list[np.ndarray]] = [[], [], [], [], [], []]
    calibration: tuple[np.ndarray, ...] = ()
    for number, each in enumerate(SPLITS[name](table)):
        rows = np.flatnonzero(each.test)
        # Other splits predict from near systems as well, so that those have to be fitted in full.
        wanted = {keys[i] for i in rows} if name in ("N", "X", "O") else None
        fitted = model.fit(table.select(each.train), cache, wanted)
        test = table.select(each.test)
        found = fitted.predict(test)
        plan = fitted.predict(test, use_residual=False)
        known = np.isfinite(found.log_time)
        values = (
            rows,
            np.full(len(rows), number),
            log_time[rows] - found.log_time,
            log_time[rows] - plan.log_time,
            found.basis,
            found.deviation,
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value[known])
        if name == "I":
            calibration = leave_one_out(fitted)
    index, part, error, plan_error, basis, deviation = (np.concatenate(c) if c else np.zeros(0) for c in columns)
    return Judged(name, index.astype(int), part, error, plan_error, basis, deviation, calibration)


def leave_one_out(fitted: model.Model) -> tuple[np.ndarray, ...]:
    """Error, deviation, size and basis of each fitted point predicted from all others."""
    error, deviation = fitted.residual.leave_one_out()
    knots = fitted.residual.knots
    ends: dict[tuple[Any, ...], tuple[float, float]] = {}
    for key, size in zip(knots.series(), knots.size, strict=True):
        low, high = ends.get(key, (np.inf, 0.0))
        ends[key] = (min(low, size), max(high, size))
    inside = [ends[k][0] < s < ends[k][1] for k, s in zip(knots.series(), knots.size, strict=True)]
    return error, deviation, knots.size, np.where(inside, "between", "beyond")
