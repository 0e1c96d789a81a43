"""Reads and writes tables of collectives: one row per point, columns as benchmarks publish them."""

import csv
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from tools.simulator.table import OPS, Row, Table

# A row is described by these.
REQUIRED = ("source", "hardware", "interconnect", "op", "dtype", "ranks", "ranks_per_node", "bytes", "note")


class TableError(ValueError):
    """A table that cannot be read; the message names file, line and column."""


def parse_note(text: str) -> dict[str, str]:
    """Splits `a=1; b; c=2`. A part without `=` is its own key."""
    notes = {}
    for part in text.split(";"):
        key, _, value = part.strip().partition("=")
        if key:
            notes[key] = value
    return notes


def read(path: str | pathlib.Path) -> Table:
    """Reads a CSV file with the columns of `REQUIRED`; others are kept as they are.

    Raises:
      TableError: missing columns, cells that are no numbers, unknown ops; names file, line and column.
    """
    try:
        # newline="": quoted cells may hold line ends, and the csv module counts lines itself.
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True)
            try:
                return _read(str(path), reader)
            except csv.Error as error:
                raise TableError(f"{path}:{reader.line_num}: {error}") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not UTF-8: {error}") from None
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None


def _read(path: str, reader: Any) -> Table:
    columns = tuple(next(reader, ()))
    if not columns:
        raise TableError(f"{path}:1: empty file, expected a line of column names")
    repeated = sorted({c for c in columns if columns.count(c) > 1})
    if repeated:
        raise TableError(f"{path}:1: column {repeated[0]} appears twice")
    missing = [c for c in REQUIRED if c not in columns]
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
        rows.append(_row(path, number, dict(zip(columns, line, strict=True))))
    return Table(columns, tuple(cells), tuple(rows))


def positive(text: str) -> float | None:
    """A positive number; None for other texts."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None


def _row(path: str, line: int, cell: dict[str, str]) -> Row:
    def fail(column: str, expected: str) -> None:
        raise TableError(f"{path}:{line}: column {column}: got {cell[column]!r}, expected {expected}")

    def integer(column: str) -> int:
        if not cell[column].isascii() or not cell[column].isdigit() or int(cell[column]) < 1:
            fail(column, "an integer from 1")
        return int(cell[column])

    if cell["op"] not in OPS:
        fail("op", f"one of {', '.join(OPS)}")
    for column in ("source", "hardware"):
        if not cell[column]:
            fail(column, "a name")
    expert, size = cell["op"].startswith("ep_"), positive(cell["bytes"])
    if size is None and not (expert and not cell["bytes"]):
        fail("bytes", "a positive number" + (" or nothing" if expert else ""))
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
        bytes=size,
        notes=notes,
    )


def write(path: str | pathlib.Path, table: Table, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Writes the table's own cells, row by row, with more columns behind them."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*table.columns, *columns))
        writer.writerows((*old, *new) for old, new in zip(table.cells, cells, strict=True))
