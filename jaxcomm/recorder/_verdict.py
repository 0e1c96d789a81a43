"""Decides why a program does not go on, from the rings of its processes.

A call that waits for longer than the window is followed to the process that it waits for, and from there on, until a
process is found that waits for no other one. Calls are matched by their keys. A process that has not the same call is
compared by the calls that it is in.
"""

import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator

from jaxcomm.recorder import _file, _runs

_SILENT_S = 2.0  # a process writes the time ten times a second
_NOTICED_S = 10.0  # after the death of a process, its peers' calls fail within 2 s, or later on a busy machine
# As Endpoint.waiting() describes a request, with the seconds.
_WAITING = re.compile(r"^endpoint .* waits: (?:open|read) .*: ([\d.]+) s(?:, .*)?$", re.MULTILINE)


class Verdict(enum.Enum):
    """What keeps a program from going on. Earlier members explain later ones."""

    OTHER_VERSION = "other version"
    DEAD = "process dead"
    DUMP_MISSING = "dump missing"
    CROSSED = "deadlock across groups"
    OTHER_SHAPE = "other shape or dtype"
    OTHER_ORDER = "other order"
    OTHER_CALL = "other call"
    NEVER_JOINED = "never joined"
    OUTSIDE = "stuck outside a collective"
    TRANSFER = "stuck in a transfer"
    CUT_LINK = "cut link"
    FAILED = "failed call"
    NO_PROGRESS = "no progress"
    OK = "ok"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
      verdict: kind of the cause.
      processes: those that cause it.
      behind: the ranks for which the others wait.
      waiting: the ranks that wait.
      lines: explanation.
    """

    verdict: Verdict
    processes: tuple[int, ...]
    behind: tuple[int, ...]
    waiting: tuple[int, ...]
    lines: tuple[str, ...]


class _Diagnosis:
    def __init__(self, run: _runs.Run, window_s: float) -> None:
        self.run, self.window_s = run, window_s
        self.rings = run.rings
        self.now = {process: ring.now_ns() for process, ring in self.rings.items()}
        self.unfinished = [(at, call) for at, ring in self.rings.items() for call in ring.calls if call.phase != "done"]

    # Calls

    def waits(self, process: int) -> list[_file.Call]:
        """Open calls of a process that have waited for the window, or will never end."""
        window_s = 0 if self.is_dead(process) else self.window_s
        return [
            call
            for call in self.rings[process].calls
            if call.is_open
            and self.lasted_s(process, call) >= window_s
            and not self.died_between_arrivals(process, call)
        ]

    def lasted_s(self, process: int, call: _file.Call) -> float:
        return (self.now[process] - call.arrived_ns) / 1e9

    def died_between_arrivals(self, process: int, call: _file.Call) -> bool:
        """Whether a process was killed between two of its devices, for which it had not waited long."""
        return self.is_dead(process) and not call.key and self.lasted_s(process, call) < _SILENT_S

    def last_failures(self, process: int) -> list[_file.Call]:
        """Failed calls that no later call of their group has followed."""
        last: dict[int, _file.Call] = {}
        for call in self.rings[process].calls:
            last[call.group.hash] = call
        return [call for call in last.values() if call.phase == "failed"]

    def current(self, process: int) -> list[_file.Call]:
        """The calls that a process is in, or in which it has failed."""
        return [call for call in self.rings[process].calls if call.is_open] or self.last_failures(process)

    def same_call(self, call: _file.Call, process: int) -> _file.Call | None:
        if not call.key:
            return None
        return next((other for other in self.rings[process].calls if other.key == call.key), None)

    # Processes

    def is_silent(self, process: int) -> bool:
        """Whether a process of another host has shown no sign of life for long, by its calendar clock.

        Until its host has answered; of files that were copied otherwise, until the latest sign of life of all.
        """
        header = self.rings[process].header
        latest = header["read_unix_ns"] or max(int(ring.header["alive_unix_ns"]) for ring in self.rings.values())
        return bool((int(latest) - int(header["alive_unix_ns"])) / 1e9 > _SILENT_S)

    def is_dead(self, process: int) -> bool:
        state = self.rings[process].state
        return state == "dead" or state.startswith("ended") or (state == "unknown" and self.is_silent(process))

    def is_stopped(self, process: int) -> bool:
        """Whether a process is stopped, or was when it gave its last sign of life.

        Peers wait for a process that is stopped. If a process ends, their calls fail.
        """
        state = self.rings[process].state
        if state == "stopped" or not self.is_dead(process) or state.startswith("ended"):
            return state == "stopped"
        last_s = self.last_s(process)
        for at, call in self.unfinished:
            end_ns = (self.now[at] if call.is_open else call.ended_ns) + self.run.offset_ns[at]
            begin_s = max((call.arrived_ns + self.run.offset_ns[at]) / 1e9, last_s)
            unnoticed = call.is_open and state == "dead" and self.rings[at].state == "running"
            if end_ns / 1e9 - begin_s > _NOTICED_S and process in call.group.processes and not unnoticed:
                return True
        return False

    def last_s(self, process: int) -> float:
        """The latest sign of life, on the clock of the first process."""
        return (int(self.rings[process].header["alive_ns"]) + self.run.offset_ns[process]) / 1e9

    def died_first(self, other: int, process: int, call: _file.Call) -> bool:
        """Whether `process` waited for a dead process. After a hang, launchers kill all processes: no cause."""
        if self.is_stopped(other):
            return False
        if not self.is_dead(other) or not self.is_dead(process):
            return self.is_dead(other)
        killed = [self.rings[at].state in ("dead", "unknown") for at in (other, process)]
        if not killed[0] and not self.current(other):
            return True
        open_calls = [
            their
            for their in self.current(other)
            if their.is_open and their.key != call.key and not self.died_between_arrivals(other, their)
        ]
        ended = [self.same_call(their, process) for their in open_calls]
        if not all(own is not None and own.phase == "done" for own in ended):
            return False  # it waited too, in a call that this process had not left
        if killed[0] and not killed[1]:
            return True
        death_s, end_s = self.last_s(other), self.last_s(process)
        if call.phase == "failed":
            return death_s <= (call.ended_ns + self.run.offset_ns[process]) / 1e9
        hung_s = death_s - (call.arrived_ns + self.run.offset_ns[process]) / 1e9
        return hung_s < self.window_s and end_s - death_s > _SILENT_S

    def crosses_hosts(self, one: int, other: int) -> bool:
        return bool(self.rings[one].header["node"] != self.rings[other].header["node"])

    # Findings

    def follow(self, process: int, call: _file.Call, path: tuple[tuple[int, _file.Call], ...]) -> Iterator[Finding]:
        """The causes for which a process stays in a call. `path`: the calls that led here."""
        path = (*path, (process, call))
        if call.phase == "arriving" and self.is_stopped(process):  # between two of its devices
            lines = [self.describe(process, call.group)]
            yield self.finding(Verdict.OUTSIDE, [process], call.group.ranks_of(process), path, lines)
            return
        if self.disagrees(process, call):
            yield self.disagreement(process, call, path)
            return
        if call.phase == "arriving" or not call.key:
            missing = [rank for rank in call.group.ranks_of(process) if rank not in call.arrived]
            text = f"ranks {missing} of process {process} did not arrive at {call}; ranks {list(call.arrived)} did"
            yield self.finding(Verdict.NEVER_JOINED, [process], missing, path, [text])
            return
        absent = [other for other in dict.fromkeys(call.group.processes) if not self.has_joined(call, process, other)]
        for other in absent:
            yield from self.absent(process, call, other, path)
        if not absent:
            yield from self.all_joined(process, call, path)

    def has_joined(self, call: _file.Call, process: int, other: int) -> bool:
        return other == process or (other in self.rings and self.same_call(call, other) is not None)

    def absent(
        self, process: int, call: _file.Call, other: int, path: tuple[tuple[int, _file.Call], ...]
    ) -> Iterator[Finding]:
        """`other` is not in the call."""
        behind = call.group.ranks_of(other)
        if other not in self.rings:
            text = f"process {other} (ranks {behind}) has no file: it has ended early, or its file was not copied"
            yield self.finding(Verdict.DUMP_MISSING, [other], behind, path, [text])
            return
        ring = self.rings[other]
        if self.died_first(other, process, call):
            yield self.finding(Verdict.DEAD, [other], behind, path, [self.describe(other, call.group)])
            return
        if self.is_stopped(other):
            yield self.finding(Verdict.OUTSIDE, [other], behind, path, [self.describe(other, call.group)])
            return
        theirs = self.current(other)
        if not theirs:
            knows = any(site.text == call.site.text and site.group.hash == call.group.hash for site in ring.sites)
            verdict = Verdict.OUTSIDE if knows else Verdict.NEVER_JOINED
            yield self.finding(verdict, [other], behind, path, [self.describe(other, call.group)])
            return
        for their in theirs:
            if their.group.hash == call.group.hash:
                yield self.differ(process, call, other, their, path)
            elif any(earlier.key == their.key and at == other for at, earlier in path):
                yield self.crossed(path)
            else:
                yield from self.follow(other, their, path)

    def crossed(self, path: tuple[tuple[int, _file.Call], ...]) -> Finding:
        lines = [f"process {at} (ranks {call.group.ranks_of(at)}) waits in {call}" for at, call in path]
        processes = sorted({at for at, _ in path})
        behind = sorted({rank for at, call in path for rank in call.group.ranks_of(at)})
        return self.finding(Verdict.CROSSED, processes, behind, path, lines)

    def differ(
        self, process: int, call: _file.Call, other: int, their: _file.Call, path: tuple[tuple[int, _file.Call], ...]
    ) -> Finding:
        """Two processes are in different calls of one group."""
        if call.site.text == their.site.text and self.disagrees(other, their):
            return self.disagreement(other, their, path)
        sizes = [(c.input_count, c.output_count, c.dtype) for c in (call, their)]
        knows = [
            any(site.text == text and site.group.hash == call.group.hash for site in self.rings[at].sites)
            for at, text in ((process, their.site.text), (other, call.site.text))
        ]
        if call.site.text == their.site.text and sizes[0] != sizes[1]:
            verdict = Verdict.OTHER_SHAPE
        elif call.site.text != their.site.text and all(knows):
            verdict = Verdict.OTHER_ORDER
        else:
            verdict = Verdict.OTHER_CALL
        lines = [
            f"process {at} (ranks {c.group.ranks_of(at)}) is in {c}" for at, c in ((process, call), (other, their))
        ]
        if call.site.text == their.site.text and sizes[0] == sizes[1]:
            errors = [f"process {at}: {text}" for at in (process, other) for _, text in self.rings[at].errors[-1:]]
            equal = "the calls are equal: the programs differ elsewhere, or their numbers of executions do"
            lines += errors or [equal]
        # Without an order among the calls, all ranks of the group are involved.
        behind = [other] if their.sequence < call.sequence else [process] if their.sequence > call.sequence else None
        ranks = [r for at in behind or (process, other) for r in call.group.ranks_of(at)]
        return self.finding(verdict, sorted({process, other}), ranks, path, lines)

    def disagrees(self, process: int, call: _file.Call) -> bool:
        """Whether a call failed because the devices of a process did not agree: before others could know of it."""
        errors = [text for _, text in self.own_errors([process]) if "(process " not in text]
        return call.phase == "failed" and not call.key and bool(errors)

    def disagreement(self, process: int, call: _file.Call, path: tuple[tuple[int, _file.Call], ...]) -> Finding:
        ((_, text),) = self.own_errors([process])
        lines = [f"process {process}: {text}"]
        return self.finding(Verdict.FAILED, [process], self.ranks(call, [process]), path, lines)

    def all_joined(self, process: int, call: _file.Call, path: tuple[tuple[int, _file.Call], ...]) -> Iterator[Finding]:
        """All processes of the group have entered the call, and this one does not get on."""
        members = dict.fromkeys(call.group.processes)
        peer = call.group.process_of(call.waiting_peer) if call.waiting_peer is not None else None
        ordered = [m for m in dict.fromkeys(([peer] if peer is not None else []) + list(members)) if m != process]
        own = self.same_calls(call, members)
        last_ns = self.last_s(process) * 1e9
        ends = [other.ended_ns + self.run.offset_ns[m] for m, other in own.items() if not other.is_open]
        if call.is_open and self.is_dead(process) and any(end >= last_ns - _SILENT_S * 1e9 for end in ends):
            lines = [self.describe(process, call.group)]
            yield self.finding(Verdict.DEAD, [process], self.ranks(call, [process]), path, lines)
            return
        distant = [m for m in ordered if self.crosses_hosts(process, m)]
        dead = [m for m in ordered if self.died_first(m, process, call) and (own[m].is_open or m in distant)]
        if dead:
            lines = [self.describe(m, call.group) for m in dead]
            yield self.finding(Verdict.DEAD, dead, self.ranks(call, dead), path, lines)
            return
        stopped = [m for m in [process, *ordered] if self.is_stopped(m)]
        if stopped:
            lines = [self.describe(m, call.group) for m in stopped]
            yield self.finding(Verdict.OUTSIDE, stopped, self.ranks(call, stopped), path, lines)
            return
        for other in ordered:
            if own[other].phase == "arriving":
                yield from self.follow(other, own[other], path)
                return
        errors = self.own_errors(members)
        if errors:
            at, text = errors[0]
            yield self.finding(Verdict.FAILED, [at], self.ranks(call, [at]), path, [f"process {at}: {text}"])
            return
        if distant:
            line = (
                f"all processes have entered {call}, but process {process} on host "
                f"{self.rings[process].header['host']} gets nothing from process {distant[0]} on host "
                f"{self.rings[distant[0]].header['host']}"
            )
            yield self.finding(
                Verdict.CUT_LINK, sorted([process, distant[0]]), self.ranks(call, distant[:1]), path, [line]
            )
            return
        line = f"all processes have entered {call}, and none is dead or stopped"
        yield self.finding(Verdict.NO_PROGRESS, list(members), self.ranks(call, ordered), path, [line])

    def same_calls(self, call: _file.Call, members: Iterable[int]) -> dict[int, _file.Call]:
        found = {member: self.same_call(call, member) for member in members if member in self.rings}
        return {member: other for member, other in found.items() if other is not None}

    def own_errors(self, members: Iterable[int]) -> list[tuple[int, str]]:
        """Errors that are not about other processes, the earliest first."""
        found = []
        for member in members:
            ring = self.rings[member]
            for at, text in ring.errors[-1:]:
                if not any(sign in text for sign in ("aborted", "JAXCOMM_TIMEOUT_S", "cannot be reached", "has ended")):
                    found.append((at + self.run.offset_ns[member], member, text))
        return [(member, text) for _, member, text in sorted(found)]

    def ranks(self, call: _file.Call, processes: Iterable[int]) -> list[int]:
        return [rank for process in processes for rank in call.group.ranks_of(process)]

    def describe(self, process: int, group: _file.Group) -> str:
        """State of a process and its last call in a group."""
        ring = self.rings[process]
        states = {
            "dead": "was killed or has crashed",
            "stopped": "is stopped, by a debugger or a signal",
            "running": "runs and is in no collective",
            "unknown": "has given no sign of life for long" if self.is_silent(process) else "is in no collective",
        }
        state = states.get(ring.state) or f"has {ring.state}"
        if ring.state != "stopped" and self.is_stopped(process):
            state = (
                "was stopped: it gave no more signs of life, and the calls of others that waited for it did not fail"
            )
        where = f"pid {ring.header['pid']} on {ring.header['host']}"
        text = f"process {process} (ranks {group.ranks_of(process)}, {where}) {state}"
        calls = [call for call in ring.calls if call.group.hash == group.hash]
        if not calls:
            number = ring.last_dropped(group)
            return f"{text}; it has made {f'{number} calls' if number else 'no call'} of the group"
        last = calls[-1]
        if last.is_open:
            return f"{text}; it is in {last}, {last.phase}"
        ago_s = max(self.now[process] - last.ended_ns, 0) / 1e9
        return f"{text}; its last call of the group, {last}, {last.phase} {ago_s:.1f} s before"

    def finding(
        self,
        verdict: Verdict,
        processes: Iterable[int],
        behind: Iterable[int],
        path: tuple[tuple[int, _file.Call], ...],
        lines: list[str],
    ) -> Finding:
        process, call = path[0]
        waited_s = ((call.ended_ns or self.now[process]) - call.arrived_ns) / 1e9
        waiting = [rank for rank in call.group.ranks_of(process) if rank not in set(behind)]
        own = f"process {process} (ranks {call.group.ranks_of(process)}) waited in {call}, {call.phase}"
        return Finding(
            verdict, tuple(processes), tuple(behind), tuple(waiting), (*lines, f"{own}, for {waited_s:.1f} s")
        )

    def versions(self) -> Finding | None:
        of: dict[str, list[int]] = {}
        for process, ring in self.rings.items():
            of.setdefault(str(ring.header["version_text"]), []).append(process)
        if len(of) == 1:
            return None
        most = max(map(len, of.values()))
        usual = [processes for processes in of.values() if len(processes) == most]
        others = [p for p in self.rings if len(usual) > 1 or p not in usual[0]]
        lines = tuple(f"jaxcomm {version}: processes {processes}" for version, processes in of.items())
        return Finding(Verdict.OTHER_VERSION, tuple(others), (), (), lines)

    def without_calls(self) -> Iterator[Finding]:
        """Nothing waits in a call: files that are missing, and programs that are elsewhere."""
        missing = sorted(set(range(self.run.num_processes)) - self.rings.keys())
        if missing:
            yield Finding(Verdict.DUMP_MISSING, tuple(missing), (), (), (f"processes {missing} have no file",))
        killed = [p for p, ring in self.rings.items() if ring.state == "dead"]
        alive = [p for p in self.rings if not self.is_dead(p)]
        if killed and alive:
            lines = tuple(f"process {p} was killed or has crashed" for p in killed)
            yield Finding(Verdict.DEAD, tuple(killed), (), (), lines)
        stopped = [p for p in alive if self.rings[p].state == "stopped"]
        idle = [(self.now[p] - self.rings[p].progress_ns()) / 1e9 for p in alive]
        if stopped:
            lines = tuple(f"process {p} is stopped, by a debugger or a signal" for p in stopped)
            yield Finding(Verdict.OUTSIDE, tuple(stopped), (), (), lines)
        elif alive and min(idle) >= self.window_s:
            line = f"no process is in a collective; the latest sign of progress was {min(idle):.1f} s ago"
            yield Finding(Verdict.OUTSIDE, tuple(alive), (), (), (line,))


def diagnose(run: _runs.Run, window_s: float) -> list[Finding]:
    """The causes, the root first; one finding of Verdict.OK if the program goes on."""
    diagnosis = _Diagnosis(run, window_s)
    found = [finding for finding in [diagnosis.versions()] if finding]
    for calls_of in (diagnosis.waits, diagnosis.last_failures):
        causes = [f for p in run.rings for call in calls_of(p) for f in diagnosis.follow(p, call, ())]
        if causes:
            found += causes
            break
    else:
        found += diagnosis.without_calls()
    order = list(Verdict)
    merged: dict[tuple[Verdict, tuple[int, ...]], Finding] = {}
    for finding in sorted(found, key=lambda f: order.index(f.verdict)):
        key = finding.verdict, tuple(sorted(finding.processes))
        if key not in merged:
            merged[key] = finding
            continue
        first = merged[key]
        waiting = sorted({*first.waiting, *finding.waiting} - set(first.behind))
        merged[key] = dataclasses.replace(first, waiting=tuple(waiting))
    if merged:
        return list(merged.values())
    flying = [call for ring in run.rings.values() for call in ring.calls if call.is_open]
    return [Finding(Verdict.OK, (), (), (), (f"{len(flying)} calls are in flight, none for {window_s:g} s",))]


def in_transfers(findings: Iterable[Finding], stacks: dict[int, str], window_s: float) -> list[Finding]:
    """Names the endpoints for which the processes of the findings wait, by what these have written before their stacks.

    A wait for a later version ("watch") is none: nobody need publish it.
    """
    made = []
    for finding in findings:
        waits = [
            f"process {process}: {line[0]}"
            for process in finding.processes
            for line in _WAITING.finditer(stacks.get(process, ""))
            if float(line[1]) >= window_s
        ]
        if waits and finding.verdict in (Verdict.OUTSIDE, Verdict.NEVER_JOINED):
            finding = dataclasses.replace(finding, verdict=Verdict.TRANSFER, lines=(*waits, *finding.lines))
        made.append(finding)
    return made
