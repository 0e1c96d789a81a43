"""Tables with measured times, and the series that their rows form."""

import pathlib
from collections.abc import Iterable

import numpy as np

from tools.simulator import table_file
from tools.simulator.table import Row, Table
from tools.simulator.table_file import TableError

# Notes that follow from the measured time: two rows of one series may differ in them.
_RESULT_NOTES = frozenset({"printed", "rounding", "flag", "bw", "bytes"})
# Notes that say how large a message is.
_SIZE_NOTES = frozenset({"tokens"})


def read(path: str | pathlib.Path) -> Table:
    """The rows of a table that have a time. Only rows of ``ep_`` operations may lack one.

    Raises:
      TableError: as ``table_file.read``, or a bad column ``time_us``.
    """
    found = table_file.read(path)
    if "time_us" not in found.columns:
        raise TableError(f"{path}:1: missing columns time_us; found {', '.join(found.columns)}")
    for row, cell in zip(found.rows, _cells(found), strict=True):
        value = table_file.positive(cell)
        if value is None and (cell or not row.op.startswith("ep_")):
            raise TableError(f"{path}:{row.line}: column time_us: got {cell!r}, expected a positive number")
    return select(found, map(bool, _cells(found)))


def _cells(found: Table) -> list[str]:
    column = found.columns.index("time_us")
    return [cells[column] for cells in found.cells]


def select(found: Table, mask: Iterable[bool]) -> Table:
    """The rows where the mask is true."""
    kept = [i for i, keep in enumerate(mask) if keep]
    cells, rows = tuple(found.cells[i] for i in kept), tuple(found.rows[i] for i in kept)
    return Table(found.columns, cells, rows)


def times(found: Table) -> np.ndarray:
    """Measured microseconds."""
    return np.array(_cells(found), float)


def is_warm_up(row: Row) -> bool:
    """Whether a row is slower than a larger size of its series: mostly warm-up of the benchmark."""
    return "flag" in row.notes


def series(row: Row) -> tuple[str, ...]:
    """Rows that differ in size only have the same series."""
    rest = sorted(f"{k}={v}" for k, v in row.notes.items() if k not in _RESULT_NOTES | _SIZE_NOTES)
    ranks = (str(row.ranks), str(row.ranks_per_node))
    return (row.repo, row.hardware, row.interconnect, row.op, row.dtype, *ranks, *rest)
