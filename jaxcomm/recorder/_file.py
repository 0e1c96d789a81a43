"""Reads files of the flight recorder. A file describes its own layout (ffi/recorder/layout.h)."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm._processes import bootstrap

_MAGIC, _VERSION, _LAYOUT_AT = b"jaxcommR", 2, 16
SUFFIX, DUMP = ".ring", ".ring.dump"
READ_AT = ".read_at"  # beside the copy of a ring from another host: that host's calendar time then, in ns
_ENDED = ("done", "failed")


class Unreadable(Exception):
    """A file that is not of the recorder, or too short. The text is one line."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks by position, and the process of each."""

    hash: int
    ranks: tuple[int, ...]
    processes: tuple[int, ...]

    def ranks_of(self, process: int) -> list[int]:
        return [rank for rank, of in zip(self.ranks, self.processes, strict=True) if of == process]

    def process_of(self, rank: int) -> int | None:
        return self.processes[self.ranks.index(rank)] if rank in self.ranks else None


@dataclasses.dataclass(frozen=True)
class Site:
    """A call site in one group, with its counters."""

    text: str
    algorithm: str
    identity: int
    group: Group
    calls: int
    failed: int
    bytes: int
    time_ns: int
    waiting_ns: int


@dataclasses.dataclass(frozen=True)
class Call:
    number: int
    key: int
    run_id: int
    iteration: int
    sequence: int
    input_count: int
    output_count: int
    item_bytes: int
    dtype: str
    phase: str
    arrived_ns: int
    started_ns: int
    running_ns: int
    ended_ns: int
    arrived: tuple[int, ...]  # ranks of this process
    waiting_rank: int | None
    waiting_peer: int | None
    site: Site

    @property
    def is_open(self) -> bool:
        return self.phase not in _ENDED

    @property
    def group(self) -> Group:
        return self.site.group

    def __str__(self) -> str:
        algorithm = f", {self.site.algorithm}" if self.site.algorithm else ""
        return (
            f"{self.site.text} ({self.input_count} -> {self.output_count} elements of {self.dtype}{algorithm}; call "
            f"{self.sequence} of its group, iteration {self.iteration + 1})"
        )


@dataclasses.dataclass
class Ring:
    """What one process has recorded."""

    path: pathlib.Path
    header: dict[str, Any]
    sites: list[Site]
    calls: list[Call]  # in the order of their numbers
    sequences: dict[int, int]  # by hash of the group: of the latest call
    errors: list[tuple[int, str]]  # time and text, oldest first
    warnings: list[str]

    @property
    def process(self) -> int:
        return int(self.header["process"])

    @functools.cached_property
    def state(self) -> str:
        """ "running", "stopped", "dead", an ending, or "unknown" on another host."""
        if ending := self.header["ending"]:
            return f"ended ({ending})"
        if self.header["kernel"] != bootstrap.kernel_id():
            return "unknown"
        try:
            text = pathlib.Path(f"/proc/{self.header['pid']}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "dead"
        if int(text[19]) != self.header["process_start_ticks"] or text[0] in "ZX":
            return "dead"
        return "stopped" if text[0] in "Tt" else "running"

    def now_ns(self) -> int:
        """The time on the process's clock. Those of other kernels are known up to their latest sign of life only."""
        alive_ns = int(self.header["alive_ns"])
        return max(time.monotonic_ns(), alive_ns) if self.state in ("running", "stopped") else alive_ns

    def last_dropped(self, group: Group) -> int:
        """Sequence number of the latest call of a group that the ring has not kept; 0 if it has all."""
        kept = {call.sequence for call in self.calls if call.group.hash == group.hash}
        return next(number for number in range(self.sequences.get(group.hash, 0), -1, -1) if number not in kept)

    def progress_ns(self, with_failures: bool = True) -> int:
        """The latest time at which a call arrived, started or ended; the start if there is no call."""
        times = [t for call in self.calls for t in (call.arrived_ns, call.started_ns, call.running_ns)]
        times += [call.ended_ns for call in self.calls if with_failures or call.phase != "failed"]
        return max([int(self.header["started_ns"]), *times])


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of "0-3,8" or "0*2,1*3"."""
    found: list[int] = []
    for first, sign, second in re.findall(r"(\d+)(?:([-*])(\d+))?", text):
        if sign == "*":
            found += [int(first)] * int(second)
        else:
            found += range(int(first), int(second or first) + 1)
    return tuple(found)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as "0-3,8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


class _Tables:
    def __init__(self, data: bytes, layout: dict[str, Any]) -> None:
        self.data, self.layout = data, layout

    def rows(self, name: str, limit: int | None = None) -> Any:
        """The readable rows of a table, as an array of records."""
        table = self.layout[name]
        kinds = [f"<{kind}" if kind[0] in "ui" else kind.replace("s", "S") for _, kind, _ in table["fields"]]
        dtype = np.dtype(
            {
                "names": [field[0] for field in table["fields"]],
                "formats": kinds,
                "offsets": [field[2] for field in table["fields"]],
                "itemsize": table["row_bytes"],
            }
        )
        readable = max(len(self.data) - table["offset"], 0) // table["row_bytes"]
        count = min(readable, table["num_rows"] if limit is None else min(limit, table["num_rows"]))
        return np.frombuffer(self.data, dtype, count, table["offset"] if count else 0)

    def text(self, row: Any, name: str) -> str:
        at = self.layout["texts"]["offset"] + int(row[name])
        return self.data[at : at + int(row[f"{name}_bytes"])].decode(errors="replace")


def read(path: pathlib.Path, with_calls: bool = True) -> Ring:
    """Reads a ring or a dump. Counters need no calls.

    Raises:
      Unreadable: nothing in the file can be used.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path.name}: {os.strerror(error.errno or 0)}") from error
    if not data:
        raise Unreadable(f"{path.name}: empty")
    if data[:8] != _MAGIC:
        raise Unreadable(f"{path.name}: not a file of the flight recorder")
    version = int.from_bytes(data[8:12], "little")
    if version < _VERSION:
        raise Unreadable(f"{path.name}: written by an older jaxcomm (format {version}, known {_VERSION})")
    warnings = []
    if version > _VERSION:
        warnings.append(f"{path.name}: written by a newer jaxcomm (format {version}, known {_VERSION})")
    try:
        layout = json.loads(_text(data[_LAYOUT_AT : _LAYOUT_AT + (1 << 16)]))
        tables = _Tables(data, layout)
        header = _header(tables) | {"read_unix_ns": _read_unix_ns(path)}
        if len(data) < layout["file_bytes"]:
            warnings.append(f"{path.name}: truncated after {len(data)} of {layout['file_bytes']} bytes")
        sites = _sites(tables, header)
        calls = _calls(tables, header, sites, layout) if with_calls else []
        sequences = {int(row["hash"]): int(row["next_sequence"]) for row in tables.rows("groups", header["num_groups"])}
        return Ring(path, header, sites, calls, sequences, _errors(tables, header), warnings)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        why = "truncated" if len(data) < 8192 else f"damaged, or of an unknown format {version} ({error})"
        raise Unreadable(f"{path.name}: {why}") from error


def _read_unix_ns(path: pathlib.Path) -> int:
    """0: unknown."""
    try:
        return int(path.with_name(path.name + READ_AT).read_text())
    except (OSError, ValueError):
        return 0


def _header(tables: _Tables) -> dict[str, Any]:
    row = tables.rows("header")[0]
    return {name: _text(row[name]) if isinstance(row[name], bytes) else int(row[name]) for name in row.dtype.names}


def _sites(tables: _Tables, header: dict[str, Any]) -> list[Site]:
    groups = [
        Group(int(row["hash"]), _numbers(tables.text(row, "ranks")), _numbers(tables.text(row, "processes")))
        for row in tables.rows("groups", header["num_groups"])
    ]
    return [
        Site(
            tables.text(row, "text"),
            tables.text(row, "algorithm"),
            int(row["identity"]),
            groups[int(row["group"])],
            *(int(row[name]) for name in ("calls", "failed", "bytes", "time_ns", "waiting_ns")),
        )
        for row in tables.rows("sites", header["num_sites"])
    ]


def _calls(tables: _Tables, header: dict[str, Any], sites: list[Site], layout: dict[str, Any]) -> list[Call]:
    dtypes, phases = list(layout["dtypes"].items()), layout["phases"]
    rows = tables.rows("calls")
    # Rows without number were never used, or are written at this moment.
    rows = rows[(rows["number"] > 0) & (rows["site"] < len(sites)) & (rows["dtype"] < len(dtypes))]
    rows = np.sort(rows, order="number")
    own_ranks = [site.group.ranks_of(header["process"]) for site in sites]
    names, calls = [field[0] for field in layout["calls"]["fields"]], []
    for values in zip(*(rows[name].tolist() for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        site, (dtype, item_bytes), phase = sites[row["site"]], dtypes[row["dtype"]], row["phase"]
        calls.append(
            Call(
                **{name: row[name] for name in ("number", "key", "run_id", "iteration", "sequence")},
                **{name: row[name] for name in ("input_count", "output_count")},
                **{name: row[name] for name in ("arrived_ns", "started_ns", "running_ns", "ended_ns")},
                dtype=dtype,
                item_bytes=item_bytes,
                phase=phases[phase] if phase < len(phases) else "unknown",
                arrived=tuple(rank for i, rank in enumerate(own_ranks[row["site"]]) if row["arrived_mask"] >> i & 1),
                waiting_rank=row["waiting_rank"] - 1 if row["waiting_rank"] else None,
                waiting_peer=row["waiting_peer"] - 1 if row["waiting_peer"] else None,
                site=site,
            )
        )
    return calls


def _errors(tables: _Tables, header: dict[str, Any]) -> list[tuple[int, str]]:
    rows = tables.rows("errors", header["num_errors"])
    return sorted((int(row["at_ns"]), _text(row["text"])) for row in rows)
