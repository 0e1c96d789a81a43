"""Runs commands in sequence, each with its own limit and all within a common one, and keeps a JSON record.

Whatever a command does, the others run, and the record is on disk after each of them.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping

LOG_BYTES = 2 << 20  # of the end of a part's log, which is kept


@dataclasses.dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
      limit_s: seconds until it is killed, with all that it has started.
      missing: why it can't run here; it is then left out.
      reports: folder where it writes lines of JSON (gpu/report.py): what each of its tests has shown.
      keep: whether the lines of its output that are JSON objects belong into the record; there must be one.
      after: part that must have passed before.
      takes_s: seconds that it should take. It is left out if so many are not left.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: str = ""
    reports: pathlib.Path | None = None
    keep: bool = False
    after: str = ""
    takes_s: int = 5

    @property
    def build(self) -> bool:
        return self.name.startswith("build")


def read_reports(folder: pathlib.Path) -> dict:
    """The reports of a part's processes: {"tests": {name: outcome}, "notes": {key: value}}.

    A test has passed if it has in all processes that ran it. One that has not ended hung, or its process died.
    """
    tests: dict[str, str] = {}
    notes: dict[str, object] = {}
    worst = ["passed", "skipped", "failed", "not ended"]
    for path in sorted(folder.glob("*.jsonl")):
        own: dict[str, str] = {}
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a process may have been killed while it wrote
                entry = json.loads(line)
                if "test" in entry:
                    reason = f": {entry['reason']}" if entry.get("reason") else ""
                    own[entry["test"]] = entry["outcome"] + reason
                else:
                    notes.setdefault(entry["note"], entry["value"])
        for name, outcome in own.items():
            before = tests.setdefault(name, outcome)
            if worst.index(outcome.partition(":")[0]) > worst.index(before.partition(":")[0]):
                tests[name] = outcome
    return {"tests": tests, "notes": notes}


def objects(lines: list[str]) -> list[dict]:
    """The JSON objects in a program's output."""
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                found.append(json.loads(line))
    return found


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # includes its child processes
    process.wait()


class _Started:
    """A running part. Records when it ends, even before wait is called."""

    def __init__(self, part: Part, process: subprocess.Popen | None, log: pathlib.Path):
        self.part, self.process, self.log = part, process, log
        self.began, self._ended = time.monotonic(), 0.0
        self._watch = threading.Thread(target=self._wait, daemon=True)
        self._watch.start()

    def _wait(self) -> None:
        if self.process is not None:
            self.process.wait()
        self._ended = time.monotonic()

    def seconds(self) -> float:
        self._watch.join()
        return round(self._ended - self.began, 1)


RESULTS = ("tests", "seconds", "left_out", "parts")


class Runner:
    """Runs parts and keeps `record`, in `out`/`name`.json; their output goes to `out`/`name`.log.

    `only`: a regular expression. Builds and the parts that it matches run; the record keeps earlier results of the
    others if they are of the same commit.
    """

    def __init__(
        self, name: str, out: pathlib.Path, work: pathlib.Path, record: dict, total_s: float, patience: float = 1,
        only: str = "",
    ):  # fmt: skip
        self.name, self.out, self.work, self.only = name, out, work, only
        earlier: dict = {}
        if only and (out / f"{name}.json").exists():
            earlier = json.loads((out / f"{name}.json").read_text())
        if earlier.get("commit") != record.get("commit"):
            earlier = {}
        self.record = record | {key: earlier.get(key, {}) for key in RESULTS}
        self._patience = patience
        self._end = time.monotonic() + total_s * patience
        out.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.log").write_text("")
        self.save()

    def save(self) -> None:
        path = self.out / f"{self.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.record, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def run(self, *parts: Part) -> None:
        """Runs parts, concurrently if there are several."""
        self.end(self.begin(*parts))

    def begin(self, *parts: Part) -> list[_Started]:
        """Starts parts; end() must follow."""
        started = []
        for part in parts:
            if self.only and not part.build and not re.search(self.only, part.name):
                continue
            for key in RESULTS:
                self.record[key].pop(part.name, None)
            reason = part.missing
            if not reason and part.after and not self.record["tests"].get(part.after):
                reason = f"{part.after} has not passed"
            left_s = max(self.left_s() / self._patience, 0)
            if not reason and left_s < part.takes_s:
                reason = f"no time was left: it takes about {part.takes_s} s, and {left_s:.0f} s were left"
            if reason:
                self.record["left_out"][part.name] = reason
                continue
            started.append(self._start(part))
        self.save()
        return started

    def end(self, parts: list[_Started]) -> None:
        """Waits for parts and records their outcome."""
        for part in parts:
            self._finish(part)
        self.save()

    def _start(self, part: Part) -> _Started:
        log = self.work / f"{part.name.replace(':', '').replace(',', '').replace('/', '-').replace(' ', '-')}.log"
        if part.reports is not None:
            part.reports.mkdir(parents=True, exist_ok=True)
            for old in part.reports.glob("*.jsonl"):
                old.unlink()
        print(f"{part.name} ...", flush=True)
        with log.open("w") as file:
            print("$", *part.command, file=file, flush=True)
            try:
                process = subprocess.Popen(
                    part.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True, env={**os.environ, **part.environment},
                )  # fmt: skip
            except OSError as error:
                print(error, file=file)
                process = None
        return _Started(part, process, log)

    def _finish(self, started: _Started) -> None:
        part, process, log, began = started.part, started.process, started.log, started.began
        passed, result = False, {}
        if process is not None:
            own_end = began + part.limit_s * self._patience
            limit_s = max(min(own_end, self._end) - time.monotonic(), 0)
            try:
                passed = process.wait(timeout=limit_s) == 0
            except subprocess.TimeoutExpired:
                why = "its limit" if own_end <= self._end else "no time was left for all parts"
                result["killed"] = f"after {time.monotonic() - began:.0f} s: {why}"
                with log.open("a") as file:
                    print(f"\nkilled {result['killed']}", file=file)
            finally:
                _kill(process)
        lines = log.read_text(errors="replace").splitlines()
        if part.reports is not None:
            result |= read_reports(part.reports)
            outcomes = [outcome.partition(":")[0] for outcome in result["tests"].values()]
            # A part whose tests were all skipped has no outcome.
            passed = passed and "passed" in outcomes and not {"failed", "not ended"} & set(outcomes)
            if result["tests"] and set(outcomes) == {"skipped"}:
                self.record["left_out"][part.name] = next(iter(result["tests"].values()))
        if part.keep:
            result["lines"] = objects(lines)
            passed = passed and bool(result["lines"])
        if part.name not in self.record["left_out"]:
            self.record["tests"][part.name] = passed
        self.record["seconds"][part.name] = started.seconds()
        if result:
            self.record["parts"][part.name] = result
        with (self.out / f"{self.name}.log").open("a") as file:
            file.write("\n".join([f"=== {part.name}", *lines, ""])[-LOG_BYTES:])
        if not passed:
            print(f"--- {part.name}\n" + "\n".join(line[:500] for line in lines[-25:]), flush=True)

    def lines(self, name: str) -> list[dict]:
        """The output of a part with `keep`."""
        return self.record["parts"].get(name, {}).get("lines", [])

    def print_table(self) -> None:
        for name, passed in self.record["tests"].items():
            seconds = self.record["seconds"][name]
            print(f"{'passed' if passed else 'FAILED':9}{seconds:7.1f} s  {name}{self._counts(name)}")
        for name, reason in self.record["left_out"].items():
            print(f"{'left out':9}{'':9}  {name}: {reason[:200]}")

    def _counts(self, name: str) -> str:
        outcomes = [o.partition(":")[0] for o in self.record["parts"].get(name, {}).get("tests", {}).values()]
        counts = [f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "not ended", "skipped")]
        return f" ({', '.join(count for count in counts if count[0] != '0')})" if outcomes else ""
