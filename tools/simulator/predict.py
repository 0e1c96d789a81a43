"""Predictions for the rows of a table."""

import numpy as np

from jaxcomm.simulate.nccl import predict
from jaxcomm.simulate.nccl.parameters import Fitted
from jaxcomm.simulate.nccl.table import Table

COLUMNS = ("predicted_us", "low_us", "high_us")


def of_rows(given: Table, fitted: Fitted) -> tuple[list[list[str]], dict[int, str]]:
    """Cells of COLUMNS for each row, empty where declined, and the reasons by row."""
    found, times_us = predict.of_table(given, fitted)
    return [[f"{x:.6g}" if np.isfinite(x) else "" for x in row] for row in times_us], found.reasons
