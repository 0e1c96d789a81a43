"""What the processes of a program do now, from their mapped files. They need not run for that."""

import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from jaxcomm.recorder import _file, _runs


@dataclasses.dataclass(frozen=True)
class Row:
    """A process.

    Attributes:
      call, phase: the oldest call that the process is in; "" if there is none.
      waiting_s: since the arrival at this call, or since the latest sign of progress.
      missing_ranks: ranks that have not come to this call, or whose process is dead or stopped in it.
      calls_per_s, bytes_per_s: calls that have ended, and bytes of their operands of one rank.
    """

    process: int
    ranks: tuple[int, ...]
    host: str
    pid: int
    state: str
    call: str
    phase: str
    waiting_s: float
    missing_ranks: tuple[int, ...]
    calls_per_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All processes with a file.

    Attributes:
      missing_ranks: those of all calls that have waited for the window, and of processes that are dead or have no file.
    """

    num_processes: int
    processes: tuple[Row, ...]
    missing_ranks: tuple[int, ...]
    notes: tuple[str, ...]

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        missing = f"missing: ranks {_file.ranges(self.missing_ranks)}" if self.missing_ranks else "no rank is missing"
        lines = [
            f"{len(self.processes)} of {self.num_processes} processes; {missing}",
            f"{'process':>7} {'ranks':12} {'state':12} {'waits':>9} {'calls/s':>9} {'MB/s':>9}  call",
        ]
        for row in self.processes:
            call = f"{row.call}, {row.phase}" if row.call else "in no collective"
            if row.missing_ranks:
                call += f"; missing: {_file.ranges(row.missing_ranks)}"
            lines.append(
                f"{row.process:7} {_file.ranges(row.ranks):12} {row.state:12} {row.waiting_s:7.1f} s "
                f"{row.calls_per_s:9.1f} {row.bytes_per_s / 1e6:9.2f}  {call}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def watch(
    folder: pathlib.Path, fetch: Callable[[], list[str]], interval_s: float, window_s: float
) -> Iterator[Snapshot]:
    """A snapshot per interval. The first one takes an interval too: rates need two readings.

    Args:
      fetch: brings the files up to date, and returns notes.

    Raises:
      FileNotFoundError: nothing in the folder can be read.
    """

    def read() -> tuple[_runs.Run, float]:
        notes = fetch()
        return _runs.find(folder, notes=notes), time.monotonic()

    before, read_at = read()
    while True:
        time.sleep(interval_s)
        run, now = read()
        yield snapshot(run, before, now - read_at, window_s)
        before, read_at = run, now


def show(snapshot: Snapshot, as_json: bool) -> None:
    """Prints a snapshot. On a terminal, the text replaces the one before, and long lines are cut."""
    if as_json or not sys.stdout.isatty():
        print(snapshot.json() if as_json else snapshot, flush=True)
        return
    width, height = shutil.get_terminal_size()
    lines = [line[:width] for line in str(snapshot).splitlines()[: height - 1]]
    print("\x1b[H\x1b[2J" + "\n".join(lines), flush=True)


def snapshot(run: _runs.Run, before: _runs.Run, elapsed_s: float, window_s: float) -> Snapshot:
    """`before`: the same program, read earlier by this time."""
    same = _by_identity(run)
    rows = tuple(_row(run, before, process, same, elapsed_s) for process in run.rings)
    missing = {rank for row in rows if row.call and row.waiting_s >= window_s for rank in row.missing_ranks}
    missing |= {rank for row in rows if row.state == "dead" for rank in row.ranks}
    groups = [site.group for ring in run.rings.values() for site in ring.sites]
    missing |= {rank for g in groups for p in set(g.processes) - run.rings.keys() for rank in g.ranks_of(p)}
    return Snapshot(run.num_processes, rows, tuple(sorted(missing)), tuple(run.notes))


def late_ranks(ring: _file.Ring, after_s: float) -> tuple[int, ...]:
    """Ranks for which calls of this process have waited for so long. Reads the files of other processes if any has."""
    late = [call for call in ring.calls if call.is_open and ring.now_ns() - call.arrived_ns >= after_s * 1e9]
    if not late:
        return ()
    run = _runs.around(ring, with_calls=True)
    same = _by_identity(run)
    return tuple(sorted({rank for call in late for rank in _missing(run, ring.process, call, same)}))


def _by_identity(run: _runs.Run) -> "dict[int, dict[_Identity, _file.Call]]":
    return {p: {_identity(call): call for call in ring.calls} for p, ring in run.rings.items()}


# Equal in all processes for one call, from its first arrival on. Its key is known later.
_Identity = tuple[int, int, int, int]


def _identity(call: _file.Call) -> _Identity:
    return call.site.identity, call.run_id, call.iteration, call.group.hash


def _row(
    run: _runs.Run,
    before: _runs.Run,
    process: int,
    same: dict[int, dict[_Identity, _file.Call]],
    elapsed_s: float,
) -> Row:
    ring, old = run.rings[process], before.rings.get(process)
    call = min((call for call in ring.calls if call.is_open), key=lambda call: call.arrived_ns, default=None)
    since_ns = call.arrived_ns if call else ring.progress_ns()
    counted = [(site.calls + site.failed, site.bytes) for site in ring.sites]
    earlier = [(site.calls + site.failed, site.bytes) for site in old.sites] if old and old.path == ring.path else []
    calls, bytes_ = (sum(row[i] for row in counted) - sum(row[i] for row in earlier) for i in (0, 1))
    return Row(
        process=process,
        ranks=tuple(sorted({rank for site in ring.sites for rank in site.group.ranks_of(process)})),
        host=ring.header["host"],
        pid=ring.header["pid"],
        state=ring.state,
        call=call.site.text if call else "",
        phase=call.phase if call else "",
        waiting_s=max(ring.now_ns() - since_ns, 0) / 1e9,
        missing_ranks=_missing(run, process, call, same) if call else (),
        calls_per_s=calls / elapsed_s,
        bytes_per_s=bytes_ / elapsed_s,
    )


def _missing(
    run: _runs.Run, process: int, call: _file.Call, same: dict[int, dict[_Identity, _file.Call]]
) -> tuple[int, ...]:
    missing: list[int] = []
    for other in dict.fromkeys(call.group.processes):
        ranks = call.group.ranks_of(other)
        theirs = call if other == process else same.get(other, {}).get(_identity(call))
        does_not_go_on = theirs and theirs.is_open and run.rings[other].state not in ("running", "unknown")
        if not theirs or does_not_go_on:
            missing += ranks
        elif theirs.phase == "arriving":
            missing += [rank for rank in ranks if rank not in theirs.arrived]
    return tuple(sorted(missing))
