"""Execution of one graph of tasks per rank, such as that of a trace.

A rank has a stream for computation, one for collectives, and one for tasks of its processor. Each stream starts the
first task that is ready. A collective starts when all ranks of its group have reached it and their streams are free.
A message waits for earlier messages of its sender on the same link; neither rank's streams are occupied.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

from jaxcomm.simulate import schedule
from jaxcomm.simulate.cluster import Cluster
from jaxcomm.simulate.schedule import Duration, Timeline
from jaxcomm.simulate.tasks import Exchange, Kernel, StepError, Task


@dataclasses.dataclass(frozen=True)
class Job:
    """A task of one rank.

    Attributes:
      work: None takes no time. An Exchange is a collective, or a message if its op is "send" or "recv".
      needs: positions of tasks of the same rank that end before this one starts.
      group: ranks of a collective, in order.
      peer, tag: of a message.
      host: whether the processor executes it, beside the computation of the device.
      where: file and node, for messages to the user.
    """

    work: Kernel | Exchange | None
    needs: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    peer: int = -1
    tag: int = 0
    host: bool = False
    where: str = ""


Graphs = Sequence[Sequence[Job]]  # by rank


def _is_message(job: Job) -> bool:
    return isinstance(job.work, Exchange) and job.work.op in ("send", "recv")


def _is_collective(job: Job) -> bool:
    return isinstance(job.work, Exchange) and not _is_message(job)


def _same(jobs: Sequence[Job]) -> bool:
    def of(job: Job) -> Any:
        assert isinstance(job.work, Exchange)
        return dataclasses.replace(job.work, site="", axes=(), groups=None)

    return all(of(job) == of(jobs[0]) for job in jobs)


class _Matches:
    """Collectives and messages that belong together, in the order of each rank's trace."""

    def __init__(self, graphs: Graphs):
        self.collective: dict[tuple[int, int], int] = {}  # of (rank, task)
        self.members: list[list[tuple[int, int]]] = []
        self.message: dict[tuple[int, int], tuple[int, int]] = {}  # receiver of a send
        calls: dict[tuple[int, ...], dict[int, list[int]]] = {}
        ends: dict[str, dict[tuple[int, int, int], list[tuple[int, int]]]] = {"send": {}, "recv": {}}
        for rank, jobs in enumerate(graphs):
            for index, job in enumerate(jobs):
                if _is_message(job):
                    assert isinstance(job.work, Exchange)
                    if not 0 <= job.peer < len(graphs):
                        raise StepError(f"{job.where}: the peer is rank {job.peer}, but there are {len(graphs)} ranks")
                    src, dst = (rank, job.peer) if job.work.op == "send" else (job.peer, rank)
                    ends[job.work.op].setdefault((src, dst, job.tag), []).append((rank, index))
                elif _is_collective(job):
                    if rank not in job.group:
                        raise StepError(f"{job.where}: rank {rank} is not in its group {list(job.group)}")
                    calls.setdefault(job.group, {}).setdefault(rank, []).append(index)
        for group, by_rank in calls.items():
            self._collectives(graphs, group, by_rank)
        for key in {**ends["send"], **ends["recv"]}:
            self._messages(graphs, ends["send"].get(key, []), ends["recv"].get(key, []))

    def _collectives(self, graphs: Graphs, group: tuple[int, ...], by_rank: dict[int, list[int]]) -> None:
        most = max(by_rank, key=lambda rank: len(by_rank[rank]))
        for number, index in enumerate(by_rank[most]):
            for rank in group:
                if rank >= len(graphs) or len(by_rank.get(rank, [])) <= number:
                    raise StepError(f"{graphs[most][index].where}: rank {rank} of its group never joins")
            row = [(rank, by_rank[rank][number]) for rank in group]
            jobs = [graphs[r][i] for r, i in row]
            if not _same(jobs):
                other = next(job for job in jobs if not _same([jobs[0], job]))
                raise StepError(f"{jobs[0].where} and {other.where} differ in operation or size")
            self.collective |= dict.fromkeys(row, len(self.members))
            self.members.append(row)

    def _messages(self, graphs: Graphs, sends: list[tuple[int, int]], recvs: list[tuple[int, int]]) -> None:
        if len(sends) != len(recvs):
            rank, index = max(sends, recvs, key=len)[min(len(sends), len(recvs))]
            missing = "received" if len(sends) > len(recvs) else "sent"
            raise StepError(f"{graphs[rank][index].where}: the message is never {missing}")
        for send, recv in zip(sends, recvs, strict=True):
            a, b = graphs[send[0]][send[1]], graphs[recv[0]][recv[1]]
            assert isinstance(a.work, Exchange) and isinstance(b.work, Exchange)
            if a.work.count != b.work.count:
                raise StepError(f"{a.where} sends {a.work.count} bytes, but {b.where} receives {b.work.count}")
            self.message[send] = recv


class _Wires:
    """Times of messages. They follow each other, at the bandwidth of the first level that both ranks share."""

    def __init__(self, cluster: Cluster):
        self.levels = cluster.levels
        self.free_s: dict[tuple[int, int], float] = collections.defaultdict(float)

    def arrival_s(self, src: int, dst: int, size: int, now_s: float, queue: bool) -> float:
        depth = next((i for i, level in enumerate(self.levels) if src // level.ranks == dst // level.ranks), None)
        depth = len(self.levels) - 1 if depth is None else depth
        wire = min(depth, 1)  # links of the domain, or adapters
        level = self.levels[wire]
        rate = min(level.bytes_per_s, self.levels[depth].flow_bytes_per_s)
        start_s = max(now_s, self.free_s[src, wire]) if queue else now_s
        sent_s = start_s + self.levels[depth].overhead_s + (size / rate if math.isfinite(rate) else 0.0)
        self.free_s[src, wire] = sent_s
        return sent_s + sum(found.latency_s for found in self.levels[wire : depth + 1])


class _Run:
    def __init__(self, graphs: Graphs, matches: _Matches, duration: Duration, cluster: Cluster, streams: bool):
        self.graphs, self.matches, self.duration, self.streams = graphs, matches, duration, streams
        self.wires = _Wires(cluster)
        self.start = [[0.0] * len(jobs) for jobs in graphs]
        self.end = [[math.nan] * len(jobs) for jobs in graphs]
        self.waits = [[len(set(job.needs)) for job in jobs] for jobs in graphs]
        self.users: list[list[list[int]]] = [[[] for _ in jobs] for jobs in graphs]
        for rank, jobs in enumerate(graphs):
            for index, job in enumerate(jobs):
                for need in set(job.needs):
                    self.users[rank][need].append(index)
        self.ready: dict[tuple[int, bool], list[int]] = collections.defaultdict(list)  # by rank and host
        self.changed: set[tuple[int, bool]] = set()  # of them, those in which a task may start
        self.busy: set[tuple[int, str]] = set()
        self.missing = [len(row) for row in matches.members]
        self.waiting: list[int] = []  # collectives that all ranks have reached
        self.sent: dict[tuple[int, int], float] = {}  # arrival, by the receiver's task
        self.posted: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, str]] = []  # end, rank (-1: collective), task, stream

    def run(self) -> None:
        for rank, jobs in enumerate(self.graphs):
            for index in range(len(jobs)):
                if not self.waits[rank][index]:
                    self._reach(rank, index, 0.0)
        self._begin(0.0)
        while self.events:
            now_s = self.events[0][0]
            while self.events and self.events[0][0] == now_s:
                _, rank, index, stream = heapq.heappop(self.events)
                for r, i in self.matches.members[index] if rank < 0 else [(rank, index)]:
                    self.busy.discard((r, stream))
                    if stream in ("compute", "host"):
                        self.changed.add((r, stream == "host"))
                    self._finish(r, i, now_s)
            self._begin(now_s)
        for rank, ends in enumerate(self.end):
            for index, end_s in enumerate(ends):
                if math.isnan(end_s):
                    raise StepError(self._cycle(rank, index))

    def _cycle(self, rank: int, index: int) -> str:
        """The tasks that wait for each other, from one that never ends."""
        senders = {to: send for send, to in self.matches.message.items()}
        at, path = (rank, index), []
        while at not in path:
            path.append(at)
            rank, index = at
            job = self.graphs[rank][index]
            needs = [(rank, need) for need in job.needs if math.isnan(self.end[rank][need])]
            if not needs and _is_collective(job):  # another rank has not reached it
                needs = [(r, i) for r, i in self.matches.members[self.matches.collective[at]] if self.waits[r][i]]
            elif not needs and at in senders:
                needs = [senders[at]]
            at = needs[0]
        around = [self.graphs[r][i].where for r, i in path[path.index(at) :]]
        if len({r for r, _ in path[path.index(at) :]}) > 1:
            names = " waits for ".join([*around[:4], *(["..."] if len(around) > 4 else [around[0]])])
            return f"{around[0]} never ends: ranks wait for each other: {names}"
        return f"{around[0]} never ends: its dependencies form a cycle"

    def _finish(self, rank: int, index: int, now_s: float) -> None:
        self.end[rank][index] = now_s
        for user in self.users[rank][index]:
            self.waits[rank][user] -= 1
            if not self.waits[rank][user]:
                self._reach(rank, user, now_s)

    def _reach(self, rank: int, index: int, now_s: float) -> None:
        """All dependencies of a task have ended."""
        job = self.graphs[rank][index]
        self.start[rank][index] = now_s
        if job.work is None:
            heapq.heappush(self.events, (now_s, rank, index, ""))
        elif isinstance(job.work, Kernel):
            heapq.heappush(self.ready[rank, job.host], index)
            self.changed.add((rank, job.host))
        elif _is_collective(job):
            number = self.matches.collective[rank, index]
            self.missing[number] -= 1
            if not self.missing[number]:
                self.waiting.append(number)
        elif job.work.op == "send":
            to = self.matches.message[rank, index]
            size = job.work.count
            self.sent[to] = self.wires.arrival_s(rank, job.peer, size, now_s, self.streams)
            heapq.heappush(self.events, (now_s, rank, index, ""))
            self._deliver(to)
        else:
            self.posted[rank, index] = now_s
            self._deliver((rank, index))

    def _deliver(self, to: tuple[int, int]) -> None:
        if to in self.sent and to in self.posted:
            heapq.heappush(self.events, (max(self.sent[to], self.posted[to]), *to, ""))

    def _begin(self, now_s: float) -> None:
        """Starts the tasks whose streams are free."""
        changed, self.changed = sorted(self.changed), set()
        for rank, host in changed:
            heap, stream = self.ready[rank, host], "host" if host else "compute"
            while heap and not (self.streams and (rank, stream) in self.busy):
                index = heapq.heappop(heap)
                work = self.graphs[rank][index].work
                assert isinstance(work, Kernel)
                self.busy.add((rank, stream))
                self.start[rank][index] = now_s
                heapq.heappush(self.events, (now_s + self.duration(work), rank, index, stream))
        held = []
        for number in self.waiting:
            row = self.matches.members[number]
            if self.streams and any((rank, "exchange") in self.busy for rank, _ in row):
                held.append(number)
                continue
            for rank, index in row:
                self.busy.add((rank, "exchange"))
                self.start[rank][index] = now_s
            work = self.graphs[row[0][0]][row[0][1]].work
            assert isinstance(work, Exchange)
            heapq.heappush(self.events, (now_s + self.duration(work), -1, number, "exchange"))
        self.waiting = held


def end_s(graphs: Graphs, duration: Duration, cluster: Cluster) -> float:
    """The time of the last task. Raises as ``execute``."""
    run = _Run(graphs, _Matches(graphs), duration, cluster, True)
    run.run()
    return max((end for rank in run.end for end in rank), default=0.0)


def execute(graphs: Graphs, duration: Duration, cluster: Cluster) -> tuple[Timeline, int]:
    """The timeline of the rank that ends last, and its number. A message lasts from its receiver's wait to its arrival.

    Raises:
      StepError: collectives or messages that do not match, or dependencies that form a cycle.
    """
    matches = _Matches(graphs)
    runs = [_Run(graphs, matches, duration, cluster, streams) for streams in (True, False)]
    for run in runs:
        run.run()
    found, free = runs
    last = max(range(len(graphs)), key=lambda rank: max(found.end[rank], default=0.0))
    keep = [i for i, job in enumerate(graphs[last]) if job.work is not None and not job.host and not _is_send(job)]
    tasks = tuple(Task(graphs[last][i].work, ()) for i in keep)  # type: ignore[arg-type]
    starts, ends = [found.start[last][i] for i in keep], [found.end[last][i] for i in keep]
    exposed = schedule.exposed(tasks, starts, ends)
    order = sorted(range(len(keep)), key=lambda i: (starts[i], i))
    made = tuple(schedule.Run(tasks[i], starts[i], ends[i], exposed[i], index=i) for i in order)
    kernels = [i for i, task in enumerate(tasks) if isinstance(task.work, Kernel)]
    spans = _union([(starts[i], ends[i]) for i, task in enumerate(tasks) if isinstance(task.work, Exchange)])
    # Messages may overlap each other.
    alone = schedule.exposed(
        (*(tasks[i] for i in kernels), *(Task(_SPAN, ()) for _ in spans)),
        [*(starts[i] for i in kernels), *(start for start, _ in spans)],
        [*(ends[i] for i in kernels), *(end for _, end in spans)],
    )
    timeline = Timeline(
        made,
        max((end for rank in found.end for end in rank), default=0.0),
        sum(ends[i] - starts[i] for i in kernels),
        sum(end - start for start, end in spans),
        sum(alone),
        max((end for rank in free.end for end in rank), default=0.0),
        alike=False,
    )
    return timeline, last


_SPAN = Exchange("recv", (), None, 0, "uint8", None, None, None, 0, True, "")


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _is_send(job: Job) -> bool:
    return isinstance(job.work, Exchange) and job.work.op == "send"
