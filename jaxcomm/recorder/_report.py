"""The analysis of a folder, as an object, as text and as JSON."""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Sequence

from jaxcomm.recorder import _file, _links, _runs, _start, _stragglers, _verdict

_SHOWN = 5
_STACKS_S = 3.0  # a process looks for the trigger twice a second


@dataclasses.dataclass(frozen=True)
class Report:
    """What the files of a program say.

    Attributes:
      verdict: kind of the first finding, such as "process dead"; "ok" if the program goes on.
      findings: the causes, the root first.
      stragglers: processes that arrived last, the one with the most waiting first.
      links: bandwidths between processes, those farthest below the prediction first.
      stacks: Python stacks of the processes of the findings, if they could write them.
      notes: files that could not be read, other runs, clocks.
      num_processes: of the program.
      processes: those with a file.
    """

    verdict: str
    findings: tuple[_verdict.Finding, ...]
    stragglers: tuple[_stragglers.Straggler, ...]
    links: tuple[_links.Link, ...]
    stacks: dict[int, str]
    notes: tuple[str, ...]
    num_processes: int
    processes: tuple[int, ...]

    def json(self) -> str:
        fields = dataclasses.asdict(self)
        for finding in fields["findings"]:
            finding["verdict"] = finding["verdict"].value
        return json.dumps(fields, indent=1)

    def __str__(self) -> str:
        lines = [f"{len(self.processes)} of {self.num_processes} processes, verdict: {self.verdict}"]
        for finding in self.findings:
            lines.append(f"- {finding.verdict.value}")
            if finding.behind:
                lines.append(f"  behind: ranks {list(finding.behind)}; waiting: ranks {list(finding.waiting)}")
            lines += [f"  {line}" for line in finding.lines]
        for process, text in self.stacks.items():
            lines += [f"stacks of process {process}:", *(f"  {line}" for line in text.splitlines())]
        if self.stragglers:
            lines.append("last to arrive:")
        for row in self.stragglers[:_SHOWN]:
            lines.append(
                f"  process {row.process} at {row.site}: {row.last} of {row.calls} calls, others waited "
                f"{row.waiting_s:.3f} s"
            )
        if self.links:
            lines.append("links, those farthest below the prediction first:")
        lines += [f"  {link}" for link in self.links[:_SHOWN]]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def analyze(
    folder: str | pathlib.Path | None = None, *, window_s: float = 10.0, dumps: bool = False, stacks: bool = True
) -> Report:
    """Finds out why the latest program of a folder does not go on.

    Args:
      folder: of the flight recorder; None means that of this user on this machine.
      window_s: calls that have waited for so long hang.
      dumps: read the copies that processes have made at their latest error, instead of their present state.
      stacks: ask the processes of this machine for their Python stacks if the program hangs. Without it, the report
        has those that they have written because a rank has waited for JAXCOMM_WARN_S.

    Returns:
      The causes, the root first.

    Raises:
      FileNotFoundError: nothing in the folder can be read.
    """
    return find(folder, window_s, dumps, stacks)[0]


def find(
    folder: str | pathlib.Path | None, window_s: float, dumps: bool, stacks: bool, notes: Sequence[str] = ()
) -> tuple[Report, _runs.Run]:
    """As `analyze`, also with what the files hold. `notes`: the first notes of the report."""
    path = pathlib.Path(folder) if folder is not None else _start.default_folder()
    run = _runs.find(path, dumps, notes)
    findings = _verdict.diagnose(run, window_s)
    found: dict[int, str] = {}
    if findings[0].verdict not in (_verdict.Verdict.OK, _verdict.Verdict.DEAD):
        processes = {process for finding in findings for process in finding.processes}
        found, current = _stacks(path, run, processes, stacks)
        findings = _verdict.in_transfers(findings, {process: found[process] for process in current}, window_s)
    report = Report(
        findings[0].verdict.value,
        tuple(findings),
        tuple(_stragglers.find(run)),
        tuple(_links.find(run)),
        found,
        tuple(run.notes),
        run.num_processes,
        tuple(run.rings),
    )
    return report, run


def _stacks(folder: pathlib.Path, run: _runs.Run, processes: set[int], ask: bool) -> tuple[dict[int, str], set[int]]:
    """Stacks that processes have written, and the processes whose stacks are of their present wait.

    `ask`: touches the trigger, and waits until those that run have.
    """
    names = {p: ring.path.name.partition(_file.SUFFIX)[0] + _start.STACKS for p, ring in run.rings.items()}
    files = {process: folder / names[process] for process in processes & names.keys()}
    running = {process for process in files if ask and run.rings[process].state == "running"}
    before = {process: _start.touched(file) for process, file in files.items()}
    if running:
        try:
            (folder / _start.TRIGGER).touch()
        except OSError as error:
            run.notes.append(f"no stacks: the trigger cannot be written: {error.strerror}")
            running = set()
    deadline = time.monotonic() + _STACKS_S
    while any(_start.touched(files[p]) == before[p] for p in running) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in sorted(running):
        if _start.touched(files[process]) == before[process]:
            run.notes.append(f"process {process} has written no stacks: it may hold Python's lock")
    found = {process: _readable(file.read_text()) for process, file in sorted(files.items()) if file.exists()}
    since = {p: before[p] if p in running else _progress_unix_ns(run.rings[p]) for p in found}
    return found, {process for process in found if _start.touched(files[process]) > since[process]}


def _progress_unix_ns(ring: _file.Ring) -> int:
    """Calendar time of the latest progress. A call that has failed made none at its end."""
    ago_ns = int(ring.header["alive_ns"]) - ring.progress_ns(with_failures=False)
    return int(ring.header["alive_unix_ns"]) - ago_ns


def _readable(text: str) -> str:
    """Without the thread that has written the stacks."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) )", text.strip())
    return "\n".join(thread for thread in threads if "in _watch" not in thread)
