"""Simple models for comparison: alpha-beta, interpolation, and the textbook ring."""

from collections import defaultdict
from typing import Any

import numpy as np

from jaxcomm._measure import least_squares
from tools.simulator import measured
from tools.simulator.holdouts import Part
from tools.simulator.table import Table


def _series(table: Table, mask: np.ndarray) -> dict[tuple[Any, ...], list[int]]:
    found = defaultdict(list)
    for i in np.flatnonzero(mask):
        found[measured.series(table.rows[i])].append(int(i))
    return found


def _line(x: np.ndarray, log_time: np.ndarray, steps: np.ndarray | None = None) -> np.ndarray:
    """Robust fit of T = alpha steps + x / beta in logarithms; logarithms of alpha and 1 / beta."""
    steps = np.ones(len(x)) if steps is None else steps
    mean = np.array([np.min(log_time - np.log(steps)), np.median(log_time - np.log(x))])
    wide = np.full(2, 10.0)
    return least_squares.minimize(
        lambda t: np.logaddexp(t[0] + np.log(steps), t[1] + np.log(x)), log_time, mean, wide, mean
    ).theta


def alpha_beta(table: Table, part: Part) -> np.ndarray:
    """T = alpha + bytes / beta for each series; log errors of the test rows, NaN where under two points remain."""
    log_time, sizes = np.log(measured.times(table)), np.array([row.size for row in table.rows])
    error = np.full(len(table), np.nan)
    train = _series(table, part.train)
    for series, test in _series(table, part.test).items():
        known = train.get(series, [])
        if len(known) >= 2:
            theta = _line(sizes[known], log_time[known])
            error[test] = log_time[test] - np.logaddexp(theta[0], theta[1] + np.log(sizes[test]))
    return np.asarray(error[part.test])


def interpolation(table: Table, part: Part) -> np.ndarray:
    """Straight lines between the points of a series, log time over log bytes; ends continue with slope 0 and 1."""
    log_time, x = np.log(measured.times(table)), np.log([row.size for row in table.rows])
    error = np.full(len(table), np.nan)
    train = _series(table, part.train)
    for series, test in _series(table, part.test).items():
        known = sorted(train.get(series, []), key=lambda i: x[i])
        if known:
            value = np.interp(x[test], x[known], log_time[known])
            error[test] = log_time[test] - value - np.maximum(x[test] - x[known[-1]], 0)
    return np.asarray(error[part.test])


def textbook(table: Table, part: Part) -> np.ndarray:
    """Ring with T = alpha steps + w bytes / beta, two parameters for each op of a harness on one machine."""
    log_time = np.log(measured.times(table))
    ranks = np.array([row.ranks for row in table.rows], float)
    dense = np.array(
        [row.op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for row in table.rows], bool
    )
    f = np.array([2.0 if row.op == "all_reduce" else 1.0 for row in table.rows])
    sent = np.array([row.size for row in table.rows]) * f * (ranks - 1) / ranks
    steps = f * (ranks - 1)
    error = np.full(len(table), np.nan)
    groups = defaultdict(list)
    for i, row in enumerate(table.rows):
        if dense[i] and row.ranks > 1:
            groups[row.repo, row.hardware, row.op, row.library, row.notes.get("algo", "")].append(i)
    for index in groups.values():
        known = [i for i in index if part.train[i]]
        test = [i for i in index if part.test[i]]
        if len(known) >= 2 and test:
            theta = _line(sent[known], log_time[known], steps[known])
            error[test] = log_time[test] - np.logaddexp(theta[0] + np.log(steps[test]), theta[1] + np.log(sent[test]))
    return np.asarray(error[part.test])
