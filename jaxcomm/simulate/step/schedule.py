"""Execution of a block of tasks on two streams: computation and collectives.

Both start the first task that is ready: computation in the order of the program, collectives in the order in which
their operands are ready. Synchronous collectives and loops occupy both streams, as in XLA, which moves nothing across
the ends of a loop. Source of the greedy order: Graham, SIAM J. Appl. Math. 17(2), 1969.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator

from jaxcomm.simulate.step.tasks import Block, Exchange, Kernel, Loop, Task

# Seconds of a kernel or a collective.
Duration = Callable[[Kernel | Exchange], float]


@dataclasses.dataclass(frozen=True)
class Run:
    """One task, or one loop with the run of its block."""

    task: Task
    start_s: float
    end_s: float
    exposed_s: float = 0.0  # collective: without computation at the same time
    inside: "Timeline | None" = None  # loop: one iteration of its slowest block


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A block in time.

    Attributes:
      runs: in the order of their starts.
      time_s: until the last task has ended.
      compute_s: the computation stream is busy.
      communication_s: the collective stream is busy.
      exposed_s: of that, without computation at the same time.
      path_s: the longest chain of dependent tasks.
    """

    runs: tuple[Run, ...]
    time_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    path_s: float

    @property
    def serial_s(self) -> float:
        """All tasks one after the other."""
        return self.compute_s + self.communication_s

    @property
    def least_s(self) -> float:
        """No order of the tasks is faster."""
        return max(self.compute_s, self.communication_s, self.path_s)

    def leaves(self, times: int = 1) -> Iterator[tuple[Run, int]]:
        """Each kernel and collective with the number of its executions. Only the slowest branch of a cond counts."""
        for run in self.runs:
            if isinstance(run.task.work, Loop):
                if run.inside is not None:
                    yield from run.inside.leaves(times * run.task.work.trips)
            else:
                yield run, times


def _loop(work: Loop, duration: Duration) -> tuple[Timeline, float]:
    inside = max((execute(block, duration) for block in work.blocks), key=lambda t: t.time_s)
    return inside, inside.time_s * work.trips


def execute(block: Block, duration: Duration) -> Timeline:
    """The times of all tasks of a block that starts at 0."""
    tasks = block.tasks
    inner: dict[int, Timeline] = {}
    lengths: list[float] = []
    for index, task in enumerate(tasks):
        if isinstance(task.work, Loop):
            inner[index], length = _loop(task.work, duration)
        else:
            length = duration(task.work)
        lengths.append(length)
    starts = _start_all(tasks, lengths)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    alone = exposed(tasks, starts, ends)
    order = sorted(range(len(tasks)), key=lambda i: (starts[i], i))
    runs = tuple(Run(tasks[i], starts[i], ends[i], alone[i], inner.get(i)) for i in order)

    compute = communication = hidden = 0.0
    path: list[float] = []
    for index, task in enumerate(tasks):
        length = lengths[index]
        if isinstance(task.work, Loop):
            compute += inner[index].compute_s * task.work.trips
            communication += inner[index].communication_s * task.work.trips
            hidden += inner[index].exposed_s * task.work.trips
            length = inner[index].path_s * task.work.trips
        elif isinstance(task.work, Exchange):
            communication += length
            hidden += alone[index]
        else:
            compute += length
        path.append(length + max((path[need] for need in task.needs), default=0.0))
    return Timeline(runs, max(ends, default=0.0), compute, communication, hidden, max(path, default=0.0))


def _start_all(tasks: tuple[Task, ...], lengths: list[float]) -> list[float]:
    waits = [len(task.needs) for task in tasks]
    users: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for need in task.needs:
            users[need].append(index)
    starts = [0.0] * len(tasks)
    compute: list[int] = []
    exchange: list[tuple[float, int]] = []

    def ready(index: int, now: float) -> None:
        work = tasks[index].work
        if isinstance(work, Exchange) and work.asynchronous:
            heapq.heappush(exchange, (now, index))
        else:
            heapq.heappush(compute, index)

    for index in range(len(tasks)):
        if not waits[index]:
            ready(index, 0.0)
    ends: list[tuple[float, int]] = []
    busy = {"compute": False, "exchange": False}
    on: dict[int, tuple[str, ...]] = {}
    now = 0.0

    def start(index: int, streams: tuple[str, ...]) -> None:
        starts[index], on[index] = now, streams
        for stream in streams:
            busy[stream] = True
        heapq.heappush(ends, (now + lengths[index], index))

    while True:
        held = False
        if compute and not busy["compute"]:
            if isinstance(tasks[compute[0]].work, Kernel):
                start(heapq.heappop(compute), ("compute",))
            else:  # waits for the collective that is under way, and no other one starts
                held = True
                if not busy["exchange"]:
                    start(heapq.heappop(compute), ("compute", "exchange"))
        if exchange and not busy["exchange"] and not held:
            start(heapq.heappop(exchange)[1], ("exchange",))
        if not ends:
            return starts
        now = ends[0][0]
        while ends and ends[0][0] == now:
            index = heapq.heappop(ends)[1]
            for stream in on[index]:
                busy[stream] = False
            for user in users[index]:
                waits[user] -= 1
                if not waits[user]:
                    ready(user, now)


def exposed(tasks: tuple[Task, ...], starts: list[float], ends: list[float]) -> list[float]:
    """Of each collective, the time in which no kernel runs. Kernels never overlap each other."""
    kernels = sorted((starts[i], ends[i]) for i, task in enumerate(tasks) if isinstance(task.work, Kernel))
    left_s = [0.0] * len(tasks)
    exchanges = sorted(
        (starts[i], i) for i, task in enumerate(tasks) if isinstance(task.work, Exchange)
    )  # in time, so that one pass finds the kernels
    first = 0
    for begin, index in exchanges:
        while first < len(kernels) and kernels[first][1] <= begin:
            first += 1
        left, at = ends[index] - begin, first
        while at < len(kernels) and kernels[at][0] < ends[index]:
            left -= min(kernels[at][1], ends[index]) - max(kernels[at][0], begin)
            at += 1
        left_s[index] = max(left, 0.0)
    return left_s
