"""The flight recorder: what the collectives of all processes do, or did when they stopped."""

import contextlib
import pathlib
from collections.abc import Iterator

from jaxcomm import _core
from jaxcomm._config import config
from jaxcomm.recorder import _chrome, _file, _runs
from jaxcomm.recorder._links import Link
from jaxcomm.recorder._prometheus import Counters, Stats, Transfers, stats
from jaxcomm.recorder._report import Report, analyze
from jaxcomm.recorder._serve import serve
from jaxcomm.recorder._stragglers import Straggler
from jaxcomm.recorder._verdict import Finding, Verdict

__all__ = [
    "Counters",
    "Finding",
    "Link",
    "Report",
    "Stats",
    "Straggler",
    "Transfers",
    "Verdict",
    "analyze",
    "dump",
    "serve",
    "stats",
    "trace",
]


def dump(path: str | pathlib.Path | None = None) -> pathlib.Path:
    """Copies the latest calls of this process to a file.

    The process does this itself after an error and a timeout, and when the file "dump" of the folder of the recorder is
    touched. `analyze(folder, dumps=True)` reads such copies.

    Args:
      path: the new file; by default, that of this process in the folder of the recorder, which the next dump replaces.

    Returns:
      The file.

    Raises:
      RuntimeError: the recorder is off, or the file cannot be written.
    """
    ring = _core.recorder.path()
    target = pathlib.Path(path) if path is not None else pathlib.Path(f"{ring}.dump")
    _core.recorder.dump(str(target))
    return target


@contextlib.contextmanager
def trace(path: str | pathlib.Path, *, steps: bool = False) -> Iterator[None]:
    """Writes the collectives of this process in a `with` block as a Chrome trace, which Perfetto opens.

    A row per rank shows the calls with bytes, algorithm, bus bandwidth and predicted time, and the time until all ranks
    had arrived. `python -m jaxcomm.recorder report` compares them. Wait for results inside the block. The trace is also
    written if the block raises. The recorder keeps JAXCOMM_RECORDER_CALLS calls; earlier calls are left out, and the
    trace says how many.

    Args:
      path: the file to write, JSON.
      steps: each call also has the steps of its plan, in order. Their times are not measured.

    Raises:
      RuntimeError: the recorder is off.
    """
    off = RuntimeError("jaxcomm.recorder.trace: the recorder is off: JAXCOMM_RECORDER names its folder")
    if config().recorder == "":
        raise off
    ring = _core.recorder.path()  # "" before the first program with a collective
    before = _file.read(pathlib.Path(ring), with_calls=False).header["num_calls"] if ring else 0
    try:
        yield
    finally:
        if not (ring := _core.recorder.path()):
            raise off
        found = _file.read(pathlib.Path(ring))
        nodes = {p: str(other.header["node"]) for p, other in _runs.around(found, with_calls=False).rings.items()}
        pathlib.Path(path).write_text(_chrome.trace(found, before + 1, nodes, steps))
