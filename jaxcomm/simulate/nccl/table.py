"""Reads tables of measured collectives: one row per point, columns as benchmarks publish them."""

import csv
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "ep_dispatch",
    "ep_combine",
)
# A row is described by these; a table that is to be predicted has nothing else.
REQUIRED = ("source", "hardware", "interconnect", "op", "dtype", "ranks", "ranks_per_node", "bytes", "note")
# Notes that follow from the measured time: two rows of one series may differ in them.
_RESULT_NOTES = frozenset({"printed", "rounding", "flag", "bw", "bytes"})
# Notes that say how large a message is.
_SIZE_NOTES = frozenset({"tokens"})


class TableError(ValueError):
    """A table that cannot be read; the message names file, line and column."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One point. Bytes are per rank, in the convention of nccl-tests; None where a table leaves them out."""

    line: int
    repo: str
    hardware: str
    interconnect: str
    op: str
    dtype: str
    ranks: int
    ranks_per_node: int
    bytes: float | None
    time_us: float | None
    notes: dict[str, str]

    @property
    def warm_up(self) -> bool:
        """Slower than a larger size of its series: mostly warm-up of the benchmark."""
        return "flag" in self.notes

    @property
    def library(self) -> str:
        return self.notes.get("lib", "")

    @property
    def series(self) -> tuple[str, ...]:
        """Rows that differ in size only have the same series."""
        rest = sorted(f"{k}={v}" for k, v in self.notes.items() if k not in _RESULT_NOTES | _SIZE_NOTES)
        ranks = (str(self.ranks), str(self.ranks_per_node))
        return (self.repo, self.hardware, self.interconnect, self.op, self.dtype, *ranks, *rest)

    @property
    def size(self) -> float:
        """Position inside the series: bytes, else tokens, else 1."""
        return self.bytes or float(self.notes.get("tokens", "1"))


@dataclasses.dataclass(frozen=True)
class Table:
    path: str
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, mask: Iterable[bool]) -> "Table":
        keep = [i for i, k in enumerate(mask) if k]
        return dataclasses.replace(
            self, cells=tuple(self.cells[i] for i in keep), rows=tuple(self.rows[i] for i in keep)
        )

    def measured(self) -> "Table":
        """Rows with a time."""
        return self.select(row.time_us is not None for row in self.rows)

    def times(self) -> np.ndarray:
        return np.array([row.time_us for row in self.rows], float)


def parse_note(text: str) -> dict[str, str]:
    """Splits `a=1; b; c=2`. A part without `=` is its own key."""
    notes = {}
    for part in text.split(";"):
        key, _, value = part.strip().partition("=")
        if key:
            notes[key] = value
    return notes


def read(path: str | pathlib.Path, times: bool = True) -> Table:
    """Reads a table.

    Args:
      path: a CSV file with the columns of `REQUIRED` and, for `times`, `time_us`; others are kept as they are.
      times: False for a table that is to be predicted.

    Raises:
      TableError: missing columns, cells that are no numbers, unknown ops; names file, line and column.
    """
    try:
        # newline="": quoted cells may hold line ends, and the csv module counts lines itself.
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True)
            try:
                return _read(str(path), reader, times)
            except csv.Error as error:
                raise TableError(f"{path}:{reader.line_num}: {error}") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not UTF-8: {error}") from None
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None


def _read(path: str, reader: Any, times: bool) -> Table:
    columns = tuple(next(reader, ()))
    if not columns:
        raise TableError(f"{path}:1: empty file, expected a line of column names")
    repeated = sorted({c for c in columns if columns.count(c) > 1})
    if repeated:
        raise TableError(f"{path}:1: column {repeated[0]} appears twice")
    missing = [c for c in (*REQUIRED, *(("time_us",) if times else ())) if c not in columns]
    if missing:
        raise TableError(f"{path}:1: missing columns {', '.join(missing)}; found {', '.join(columns)}")
    cells, rows = [], []
    for line in reader:
        if not line:
            continue  # a blank line
        number = reader.line_num
        if len(line) != len(columns):
            raise TableError(f"{path}:{number}: {len(line)} cells, expected {len(columns)} as in line 1")
        cells.append(tuple(line))
        rows.append(_row(path, number, dict(zip(columns, line, strict=True)), times))
    return Table(path, columns, tuple(cells), tuple(rows))


def _row(path: str, line: int, cell: dict[str, str], times: bool) -> Row:
    def fail(column: str, expected: str) -> None:
        raise TableError(f"{path}:{line}: column {column}: got {cell[column]!r}, expected {expected}")

    def number(column: str, optional: bool) -> float | None:
        if optional and not cell[column]:
            return None
        try:
            value = float(cell[column])
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            fail(column, "a positive number" + (" or nothing" if optional else ""))
        return value

    def integer(column: str) -> int:
        if not cell[column].isascii() or not cell[column].isdigit() or int(cell[column]) < 1:
            fail(column, "an integer from 1")
        return int(cell[column])

    if cell["op"] not in OPS:
        fail("op", f"one of {', '.join(OPS)}")
    for column in ("source", "hardware"):
        if not cell[column]:
            fail(column, "a name")
    expert = cell["op"].startswith("ep_")
    notes = parse_note(cell["note"])
    for key in ("tokens", "hidden", "topk", "groups"):
        if key in notes and not (notes[key].isascii() and notes[key].isdigit() and int(notes[key]) > 0):
            raise TableError(f"{path}:{line}: column note: got {key}={notes[key]!r}, expected an integer from 1")
    return Row(
        line=line,
        repo=cell["source"].split(":")[0],
        hardware=cell["hardware"],
        interconnect=cell["interconnect"],
        op=cell["op"],
        dtype=cell["dtype"],
        ranks=integer("ranks"),
        ranks_per_node=integer("ranks_per_node"),
        bytes=number("bytes", optional=expert),
        time_us=number("time_us", optional=expert) if times else None,
        notes=notes,
    )


def write(path: str | pathlib.Path, table: Table, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Writes the table's own cells, row by row, with more columns behind them."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*table.columns, *columns))
        writer.writerows((*old, *new) for old, new in zip(table.cells, cells, strict=True))
