"""Predicts the rows of a table: the same rows in the same order, with three columns more."""

import numpy as np

from jaxcomm.simulate import store, table

COLUMNS = ("predicted_us", "low_us", "high_us")


def rows(queries: table.Table, fitted: store.Fitted) -> tuple[list[tuple[str, str, str]], dict[int, str]]:
    """Cells of COLUMNS for each row, empty where declined, and the reasons by row."""
    found = fitted.model.predict(queries)
    size = np.array([row.size for row in queries.rows], float)
    low, high = fitted.bands.limits(found.basis, size, found.deviation)
    ends = np.stack([found.log_time, found.log_time + low, found.log_time + high], axis=1)
    cells = []
    for logs in np.exp(ends):
        text = [f"{x:.6g}" if np.isfinite(x) else "" for x in logs]
        cells.append((text[0], text[1], text[2]))
    return cells, found.reasons
