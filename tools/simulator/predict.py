"""Predictions for the rows of a table."""

import numpy as np

from tools.simulator import intervals
from tools.simulator.parameters import Fitted
from tools.simulator.table import Table

COLUMNS = ("predicted_us", "low_us", "high_us")


def of_rows(given: Table, fitted: Fitted) -> tuple[list[list[str]], dict[int, str]]:
    """Cells of COLUMNS for each row, empty where declined, and the reasons by row."""
    found = fitted.model.predict(given)
    size = np.array([row.size for row in given.rows], float)
    low, high = intervals.limits(fitted.intervals, found.evidence, size, found.deviation)
    times_us = np.exp(np.stack([found.log_time, found.log_time + low, found.log_time + high], axis=1))
    return [[f"{x:.6g}" if np.isfinite(x) else "" for x in row] for row in times_us], found.reasons
