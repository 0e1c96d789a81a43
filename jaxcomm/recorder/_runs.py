"""The rings of one program: found in a folder, with their clocks compared."""

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from jaxcomm.recorder import _file

_JUMP_S = 0.1
_APART_S = 10.0  # between dumps of one error


@dataclasses.dataclass
class Run:
    """The rings of one program, by process.

    Attributes:
      notes: one line for each thing that could not be read or is odd.
      offset_ns: what to add to a process's times to get those of the first process.
    """

    rings: dict[int, _file.Ring]
    notes: list[str]
    offset_ns: dict[int, int]

    @property
    def num_processes(self) -> int:
        return max(int(ring.header["num_processes"]) for ring in self.rings.values())


def _split(rings: list[_file.Ring]) -> list[list[_file.Ring]]:
    """Programs, the oldest first. A process that occurs again begins another program of the same coordinator."""
    runs: list[list[_file.Ring]] = []
    latest: dict[str, list[_file.Ring]] = {}
    for ring in sorted(rings, key=lambda ring: int(ring.header["started_unix_ns"])):
        job = f"{ring.header['job']} {ring.header['num_processes']}"
        if job not in latest or any(other.process == ring.process for other in latest[job]):
            latest[job] = []
            runs.append(latest[job])
        latest[job].append(ring)
    return runs


def find(folder: pathlib.Path, dumps: bool = False, notes: Sequence[str] = ()) -> Run:
    """Reads the latest program of a folder.

    Args:
      folder: of the recorder; files of several hosts may have been copied into it.
      dumps: read the copies that the processes made at their latest error instead. A process that was killed has none.
      notes: the first notes of the run.

    Raises:
      FileNotFoundError: nothing in the folder can be read; the text has a line for each file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    rings, notes = [], list(notes)
    paths = {path.stem: path for path in folder.glob(f"*{_file.SUFFIX}")}
    if dumps:
        paths |= {path.name.removesuffix(_file.DUMP): path for path in folder.glob(f"*{_file.DUMP}")}
    for _, path in sorted(paths.items()):
        try:
            rings.append(_file.read(path))
            notes += rings[-1].warnings
        except _file.Unreadable as error:
            notes.append(str(error))
    if not rings:
        raise FileNotFoundError("\n".join([f"{folder}: no readable files of the flight recorder", *notes]))
    runs = _split(rings)
    if len(runs) > 1:
        notes.append(f"{folder} has {len(runs)} runs; this is the latest, of {len(runs[-1])} files")
    by_process = {ring.process: ring for ring in sorted(runs[-1], key=lambda ring: ring.process)}
    times = [int(ring.header["alive_unix_ns"]) for ring in by_process.values()]
    if dumps and max(times) - min(times) > _APART_S * 1e9:
        notes.append(f"the dumps are of different errors: {(max(times) - min(times)) / 1e9:.0f} s lie between them")
    notes += [note for ring in by_process.values() for note in _jumps(ring)]
    return Run(by_process, notes, _offsets(by_process, notes))


def around(own: _file.Ring, with_calls: bool) -> Run:
    """The program of this ring, as far as its folder has the files of other processes."""
    rings = []
    for path in own.path.parent.glob(f"*{_file.SUFFIX}"):
        with contextlib.suppress(_file.Unreadable):
            rings.append(_file.read(path, with_calls))
    rings = [ring for ring in rings if ring.header["job"] == own.header["job"]]
    latest = {ring.process: ring for ring in sorted(rings, key=lambda ring: int(ring.header["started_unix_ns"]))}
    return Run({**latest, own.process: own}, [], {})


def _jumps(ring: _file.Ring) -> list[str]:
    """Whether the host's calendar clock was set while the process ran. Its monotonic clock is not affected."""
    unix = int(ring.header["alive_unix_ns"]) - int(ring.header["started_unix_ns"])
    jump_s = (unix - (int(ring.header["alive_ns"]) - int(ring.header["started_ns"]))) / 1e9
    if abs(jump_s) < _JUMP_S:
        return []
    return [f"process {ring.process}: the clock of host {ring.header['host']} was set by {jump_s:+.1f} s; not used"]


def _offsets(rings: dict[int, _file.Ring], notes: list[str]) -> dict[int, int]:
    """Clock offsets to the first process. Processes of a kernel share a clock.

    A collective ends on all ranks at about the same time, so the offset is the median difference of the ends of calls
    that both processes have recorded. Without such calls, the calendar clocks of the hosts decide.
    """
    first, *others = rings.values()
    boot = first.header["kernel"].partition(":")[0]
    ends = {call.key: call.ended_ns for call in first.calls if call.phase == "done" and call.key}
    offsets = {first.process: 0}
    for ring in others:
        offsets[ring.process] = 0
        if ring.header["kernel"].partition(":")[0] == boot:
            continue
        differences = [
            ends[call.key] - call.ended_ns for call in ring.calls if call.phase == "done" and call.key in ends
        ]
        if differences:
            offset, how = int(statistics.median(differences)), f"from {len(differences)} calls"
        else:
            calendar = [int(r.header["started_unix_ns"]) - int(r.header["started_ns"]) for r in (ring, first)]
            offset, how = calendar[0] - calendar[1], "from the calendar clocks"
        offsets[ring.process] = offset
        notes.append(f"process {ring.process}: clock offset {offset / 1e9:+.6f} s to process {first.process}, {how}")
    return offsets
