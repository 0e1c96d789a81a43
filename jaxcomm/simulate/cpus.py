"""The time of a plan on the CPUs of one node: threads, caches and memory of processes, as ``ffi/cpu`` uses them.

Each thread executes the steps of one rank until it has to wait, then those of the next rank (``ffi/cpu/executor.cc``).
Caches hold what was used last. Other processes read a rank's memory by system calls, or copies in shared memory.
docs/internals/simulate.md gives the reason of each rule.
"""

import collections
import dataclasses
from typing import Any

import numpy as np

from jaxcomm._core import plan

# As in ffi/cpu: kMinParallelBytes, kSmallBytes, kRemoteTileBytes, kStreamBytes.
_PARALLEL_BYTES = 1 << 20
_SMALL_BYTES = 32 << 10
_TILE_BYTES = 128 << 10
_STREAM_BYTES = 32 << 20
# Until a sleeping thread of the pool runs (futex wake to first instruction, AMD EPYC guest, 2026-11).
_WAKE_S = 26e-6
# The L2 cache of a processor, and the L3 cache that all share (AMD EPYC guest, 2026-11). docs/internals/simulate.md
# has the errors with other sizes.
CACHE_BYTES = (1 << 20, 32 << 20)
# Parts of the largest buffer that caches hold as a whole.
_PARTS = 128


@dataclasses.dataclass(frozen=True)
class Cpus:
    """The processors of a node and their memory, as one thread sees them.

    Attributes:
      devices: ranks of one process.
      processors: of the node.
      step_s: of a step or a signal, in addition to its bytes.
      private, shared: bytes per second, read and written, in a cache of the processor, and of all processors.
      memory: bytes per second that one thread reads from memory.
      memory_of_all: bytes per second that all threads together read from memory and write to it.
      call_s, remote: a read from the memory of another process: start, bytes per second. Several processes need them.
      single_copy: whether processes can read each other's memory. If not, all operands pass through windows.
      cache_bytes: of both caches.
    """

    devices: int
    processors: int
    step_s: float
    private: float
    shared: float
    memory: float
    memory_of_all: float
    call_s: float = 0.0
    remote: float = np.inf
    single_copy: bool = True
    cache_bytes: tuple[int, int] = CACHE_BYTES


_STEPS, _PRIVATE, _SHARED, _READ, _WRITTEN, _CALLS, _REMOTE = range(7)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of the threads of a node in one call.

    Attributes:
      of_ranks: (ranks, 7): steps; bytes in a private and in the shared cache, read from memory, written to memory;
        reads from other processes, and their bytes.
      of_processes: (processes, 7): copies before and after the plans.
      parallel: whether threads of the pool help.
    """

    of_ranks: np.ndarray
    of_processes: np.ndarray
    parallel: bool

    def time_s(self, cpus: Cpus) -> float:
        """Time of the call after its start."""
        # A write to memory waits in a buffer: it takes no longer than one to the shared cache.
        each = np.array([
            cpus.step_s, 1 / cpus.private, 1 / cpus.shared, 1 / cpus.memory, 1 / cpus.shared, cpus.call_s,
            1 / cpus.remote,
        ])  # fmt: skip
        ranks, processes = self.of_ranks @ each, self.of_processes @ each
        count = len(processes)
        total = ranks.sum() + processes.sum()
        processors = min(cpus.processors, len(ranks))  # a rank has one thread
        time = max(total / min(processors, max(count, processors if self.parallel else 1)), ranks.max())
        if not self.parallel:  # one thread in each process
            time = max(time, (ranks.reshape(count, -1).sum(axis=1) + processes).max())
        elif count == 1 and processors > 1:
            # The others begin when they are awake.
            most = (total + (processors - 1) * _WAKE_S) / processors
            time = max(ranks.max(), min(total, most))
        moved = self.of_ranks[:, _READ : _WRITTEN + 1].sum() + self.of_processes[:, _READ : _WRITTEN + 1].sum()
        return float(max(time, moved / cpus.memory_of_all))


class _Caches:
    """The parts that each processor used last, and those that any used last."""

    def __init__(self, cpus: Cpus, part: int) -> None:
        self.own: list[dict[Any, None]] = [{} for _ in range(cpus.processors)]
        self.all: dict[Any, None] = {}
        self.sizes = [max(1, size // part) for size in cpus.cache_bytes]

    @staticmethod
    def _use(cache: dict[Any, None], key: Any, size: int) -> bool:
        """Puts the key last. Returns whether it was there."""
        found = cache.pop(key, 0) is None
        cache[key] = None
        if len(cache) > size:
            del cache[next(iter(cache))]
        return found

    def use(self, processor: int, key: Any, write: bool) -> int:
        """Returns _PRIVATE or _SHARED if a cache holds the part, else where memory counts its bytes."""
        private = self._use(self.own[processor], key, self.sizes[0])
        shared = self._use(self.all, key, self.sizes[1])
        if write:
            for other, cache in enumerate(self.own):
                if other != processor:
                    cache.pop(key, None)
        return _PRIVATE if private else _SHARED if shared else _WRITTEN if write else _READ

    def drop(self, key: Any) -> None:
        for cache in (*self.own, self.all):
            cache.pop(key, None)


@dataclasses.dataclass
class _Thread:
    process: int
    processor: int
    next: int  # position of the rank that it tries first
    clock: float = 0.0  # bytes so far: the thread with the fewest goes on
    rank: int = -1


@dataclasses.dataclass(frozen=True)
class _Step:
    kind: str
    peer: int
    bytes: int
    dst: tuple[int, str, int] | None  # rank, buffer, first byte
    sources: tuple[tuple[int, str, int], ...]


def _steps(made: Any, item_bytes: int) -> list[_Step]:
    def place(given: Any) -> tuple[int, str, int]:
        return given.rank, given.space, given.offset * item_bytes

    sources = [place(one) for one in made.sources]
    found = []
    for step in made.steps:
        size, dst = step.count * item_bytes, None
        read: tuple[tuple[int, str, int], ...] = ()
        if step.kind not in ("signal", "wait"):
            dst = place(step.dst)
            if step.kind == "reduce":
                read = tuple(sources[step.first_source : step.first_source + step.num_sources])
            elif step.kind != "zero":
                read = (place(step.src),)
        found.append(_Step(step.kind, step.peer, size, dst, read))
    return found


class _Call:
    """One call after another, in the order in which threads run them."""

    def __init__(self, request: Any, algorithm: str, item_bytes: int, cpus: Cpus) -> None:
        self.plans = [_steps(made, item_bytes) for made in plan.build(request, algorithm)]
        self.n, self.devices = len(self.plans), min(cpus.devices, len(self.plans))
        self.processes = self.n // self.devices
        self.input, self.output = request.input_count * item_bytes, request.output_count * item_bytes
        data = [(rank, step) for rank, steps in enumerate(self.plans) for step in steps if step.dst]
        moved = sum(step.bytes * max(1, len(step.sources)) for _, step in data)
        # Buffers that other processes read and write (ffi/cpu/inter_process_program.cc).
        read = {place[1] for rank, step in data for place in step.sources if self._foreign(rank, place)}
        written = {step.dst[1] for rank, step in data if step.dst and self._foreign(rank, step.dst)}
        small = not cpus.single_copy or max(self.input, self.output) < _SMALL_BYTES
        self.window = {
            "input": "input" in read and small,
            "output": "output" in written or ("output" in read and small),
        }
        self.stream = moved >= _STREAM_BYTES and not self.window["output"]
        self.parallel = moved >= _PARALLEL_BYTES
        self.threads = max(1, cpus.processors // self.processes) if self.parallel else 1
        self.processors = cpus.processors
        # The cache of a processor holds a part, and no two chunks are of one part.
        most = min(cpus.cache_bytes[0], request.chunk_count * item_bytes or cpus.cache_bytes[0])
        self.part = max(256, min(max(self.input, self.output) // _PARTS, most))
        self.caches = _Caches(cpus, self.part)

    def _foreign(self, rank: int, place: tuple[int, str, int]) -> bool:
        return rank // self.devices != place[0] // self.devices

    def _where(self, rank: int, place: tuple[int, str, int]) -> tuple[tuple[int, str, int], bool]:
        """Where a rank finds a place, and whether only a system call reads it."""
        foreign = self._foreign(rank, place)
        if self.window.get(place[1]) and (foreign or place[1] == "output"):
            return (place[0], f"window of {place[1]}", place[2]), False
        return place, foreign and place[1] != "scratch"

    def _access(
        self, thread: _Thread, work: np.ndarray | None, place: tuple[int, str, int], size: int, write: bool
    ) -> None:
        rank, space, begin = place
        first, last = begin // self.part, (begin + size - 1) // self.part
        share = size / (last - first + 1)
        for part in range(first, last + 1):
            level = self.caches.use(thread.processor, (rank, space, part), write)
            if work is not None:
                work[level] += share
        thread.clock += size if work is not None else 0

    def _write(self, thread: _Thread, work: np.ndarray, place: tuple[int, str, int], size: int, stream: bool) -> None:
        if not stream:
            return self._access(thread, work, place, size, True)
        rank, space, begin = place
        for part in range(begin // self.part, (begin + size - 1) // self.part + 1):
            self.caches.drop((rank, space, part))
        work[_WRITTEN] += size
        thread.clock += size

    def _read(self, thread: _Thread, work: np.ndarray, place: tuple[int, str, int], size: int, remote: bool) -> None:
        if not remote:
            return self._access(thread, work, place, size, False)
        self._access(thread, None, place, size, False)
        work[_CALLS] += 1
        work[_REMOTE] += size
        thread.clock += size

    def _run(self, thread: _Thread, rank: int, step: _Step, work: np.ndarray) -> None:
        """A step that moves data."""
        assert step.dst is not None
        dst, _ = self._where(rank, step.dst)
        sources = [self._where(rank, place) for place in step.sources]
        if step.kind != "reduce":
            for place, remote in sources:
                self._read(thread, work, place, step.bytes, remote)
                if remote:  # the system call writes it too
                    self._access(thread, None, dst, step.bytes, True)
            if not any(remote for _, remote in sources):
                self._write(thread, work, dst, step.bytes, self.stream and step.dst[1] == "output")
            return
        tile = _TILE_BYTES if any(remote for _, remote in sources) else step.bytes
        for done in range(0, step.bytes, tile):
            size = min(tile, step.bytes - done)
            for (owner, space, begin), remote in sources:
                self._read(thread, work, (owner, space, begin + done), size, remote)
                work[_PRIVATE] += size if remote else 0  # the sum reads its copy
            self._access(thread, work, (dst[0], dst[1], dst[2] + done), size, True)

    def _copy(self, threads: list[_Thread], work: np.ndarray, buffer: str, into: bool) -> None:
        """Copies a buffer of all ranks into its window, or out of it: the first thread of each process."""
        size = self.input if buffer == "input" else self.output
        for thread in threads[:: self.threads] if self.window[buffer] else ():
            for rank in range(thread.process * self.devices, (thread.process + 1) * self.devices):
                places = [(rank, buffer, 0), (rank, f"window of {buffer}", 0)]
                src, dst = places if into else places[::-1]
                self._access(thread, work[thread.process], src, size, False)
                self._access(thread, work[thread.process], dst, size, True)

    def run(self) -> Work:
        ranks, processes = np.zeros((self.n, 7)), np.zeros((self.processes, 7))
        threads = [
            _Thread(number // self.threads, number % self.processors, number % self.threads)
            for number in range(self.processes * self.threads)
        ]
        self._copy(threads, processes, "input", True)
        next_step, signals = [0] * self.n, collections.Counter[tuple[int, int]]()
        taken = [False] * self.n  # by a thread, or finished
        left = self.n

        def blocked(rank: int) -> bool:
            steps, at = self.plans[rank], next_step[rank]
            return at < len(steps) and steps[at].kind == "wait" and not signals[steps[at].peer, rank]

        def take(thread: _Thread) -> bool:
            """Finds a rank that can go on."""
            for i in range(self.devices):
                local = (thread.next + i) % self.devices
                rank = thread.process * self.devices + local
                if not taken[rank] and not blocked(rank):
                    thread.rank, thread.next, taken[rank] = rank, (local + 1) % self.devices, True
                    return True
            return False

        while left:
            thread = next(t for t in sorted(threads, key=lambda t: t.clock) if t.rank >= 0 or take(t))
            rank = thread.rank
            if blocked(rank):
                taken[rank], thread.rank = False, -1
                continue
            if next_step[rank] == len(self.plans[rank]):  # the rank stays taken
                left, thread.rank = left - 1, -1
                continue
            step = self.plans[rank][next_step[rank]]
            next_step[rank] += 1
            if step.kind == "wait":
                signals[step.peer, rank] -= 1
                continue
            ranks[rank][_STEPS] += 1
            if step.kind == "signal":
                signals[rank, step.peer] += 1
            else:
                self._run(thread, rank, step, ranks[rank])
        self._copy(threads, processes, "output", False)
        return Work(ranks, processes, self.parallel)


def work(request: Any, algorithm: str, item_bytes: int, cpus: Cpus) -> Work:
    """The work of a call in a program that repeats it: caches hold data of earlier calls.

    Args:
      request: of the planner, in one node.
      algorithm: name of the plan.
      item_bytes: of an element.
      cpus: the bandwidths do not matter.

    Raises:
      ValueError: processes of the devices do not make up the ranks, or they read each other without a bandwidth.
    """
    if request.num_ranks % min(cpus.devices, request.num_ranks):
        raise ValueError(f"cpus: got {request.num_ranks} ranks, expected a multiple of {cpus.devices} devices")
    if request.num_ranks > cpus.devices and cpus.single_copy and not np.isfinite(cpus.remote):
        raise ValueError(
            f"cpus: processes of {cpus.devices} of {request.num_ranks} ranks read each other with remote = "
            f"{cpus.remote:g}; expected finite bytes per second, or single_copy = False"
        )
    call = _Call(request, algorithm, item_bytes, cpus)
    call.run()
    return call.run()
