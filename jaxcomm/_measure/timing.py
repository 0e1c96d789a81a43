"""Timing: sides (libraries) in turn, repetition by repetition, and the copy limit of the machine."""

import concurrent.futures
import dataclasses
import gc
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcomm._measure.process_group import ProcessGroup

MIN_REPS = 30
# Above this size, --max-seconds may stop a measurement before MIN_REPS.
LONG_BYTES = 1 << 20
_FEWEST_REPS = 5
# A measurement ends after MIN_REPS and this time: short ops get many repetitions, long ones few.
_ENOUGH_S = 1.5
_WARM_UPS = 2
# Between processes, _UNCOUNTED untimed calls precede each timed call that takes less than this.
_SHORT_US = 1000
_UNCOUNTED = 5
LIMIT = "limit"  # name of the copy limit, which is no library


@dataclasses.dataclass(frozen=True)
class Times:
    """Durations of one side, one per repetition."""

    us: np.ndarray

    @property
    def median_us(self) -> float:
        return float(np.median(self.us))

    @property
    def p99_us(self) -> float:
        return float(np.percentile(self.us, 99))

    def per_op(self, chain: int) -> "Times":
        return Times(self.us / chain)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


class CopyLimit:
    """The time in which `cores` threads copy n buffers of S bytes once.

    Every measured op except the barrier reads or writes n buffers of S bytes; most ops do both. For sums, the limit is
    the time to read all operands and to write as many bytes, without the time of arithmetic. Below about 1 MiB, the
    calls from Python take longer than the copies.
    """

    def __init__(self, num_buffers: int, size_bytes: int, fresh: bool):
        """fresh: allocate the destination of each copy, as jit allocates results; else reuse one destination."""
        self._fresh = fresh
        self._num_threads = min(cores(), num_buffers)
        self._sources = np.ones((num_buffers, size_bytes), np.uint8)
        self._results = None if fresh else np.zeros_like(self._sources)
        # At least 32 MiB per repetition, so that the start of the threads has little effect.
        self._rounds = 1 if fresh else min(max((32 << 20) // max(num_buffers * size_bytes, 1), 1), 64)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads)
        self._start = threading.Barrier(self._num_threads)

    def __enter__(self) -> "CopyLimit":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def _work(self, thread: int) -> float:
        mine = range(thread, len(self._sources), self._num_threads)
        kept = []  # fresh memory must stay fresh until the end
        self._start.wait()
        begin = time.perf_counter_ns()
        for _ in range(self._rounds):
            for i in mine:
                result = np.empty_like(self._sources[i]) if self._results is None else self._results[i]
                np.copyto(result, self._sources[i])  # releases the GIL
                kept.append(result)
        end = time.perf_counter_ns()
        del kept  # the clock has stopped
        return (end - begin) / 1e3 / self._rounds

    def measure_us(self) -> float:
        # The slowest thread's own time, without the delays between the starts of threads.
        return max(self._pool.map(self._work, range(self._num_threads)))


def stopwatch(function: Callable[[Any], Any], x: object) -> Callable[[], float]:
    """Returns a function that measures the microseconds from a call to its result on all devices."""

    def measure_us() -> float:
        begin = time.perf_counter_ns()
        y = function(x)
        y.block_until_ready()
        end = time.perf_counter_ns()
        del y  # the clock has stopped
        return (end - begin) / 1e3

    return measure_us


def _order(names: list[str], rep: int) -> list[str]:
    """Order of the sides in one repetition. Each side is first in turn, and the order is reversed in every other cycle.

    So the predecessor of a side, which determines the state of the caches, varies. The limit comes last.
    """
    contenders = [name for name in names if name != LIMIT]
    first = rep % len(contenders)
    turned = contenders[first:] + contenders[:first]
    if rep // len(contenders) % 2:
        turned.reverse()
    return turned + [name for name in names if name == LIMIT]


def alternate(
    sides: dict[str, Callable[[], float]],
    *,
    reps: int,
    size_bytes: int,
    max_seconds: float | None,
    processes: ProcessGroup,
) -> dict[str, Times]:
    """Measures all sides in turn, repeatedly, so that all sides are measured in the same states of the machine.

    All processes must call it. They start each repetition together; its time is that of the slowest
    process. Between processes, five untimed calls of the same side precede each timed call of a short op. They remove
    the effects of the previous side: sleeping threads and cold caches. After one untimed call, in turns with raw MPI,
    psum of 1 KiB took 13.5 us, jit of x + 1 took 7.4 us and raw MPI 3.6 us. After five untimed calls they took 8.6, 5.0
    and 2.3 us, and the same after twenty (two processes on 2 cores of an AMD EPYC, 2026-11).

    Args:
      sides: name -> function that measures one repetition in microseconds.
      reps: maximum of repetitions; the minimum is MIN_REPS.
      size_bytes: size of the op. Above LONG_BYTES, `max_seconds` may stop the measurement before MIN_REPS.
      max_seconds: time limit in seconds; None for no limit.
      processes: processes that measure together.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}

    last_us = dict.fromkeys(sides, math.inf)

    def take(name: str) -> float:
        if processes.size > 1 and processes.align(last_us[name] < _SHORT_US):
            for _ in range(_UNCOUNTED):
                processes.align()
                sides[name]()
        processes.align()
        last_us[name] = sides[name]()
        return last_us[name]

    for _ in range(_WARM_UPS):
        for name in sides:
            take(name)
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        begin = time.monotonic()
        for rep in range(reps):
            for name in _order(list(sides), rep):
                times[name].append(take(name))
            spent_s = time.monotonic() - begin
            enough = rep + 1 >= MIN_REPS and spent_s > _ENOUGH_S
            out_of_time = max_seconds is not None and spent_s > max_seconds
            too_long = rep + 1 >= _FEWEST_REPS and size_bytes > LONG_BYTES and out_of_time
            if not processes.align(not (enough or too_long)):
                break
    finally:
        if gc_was_enabled:
            gc.enable()
    gathered = processes.gather(times)
    return {name: Times(np.max([times[name] for times in gathered], axis=0)) for name in sides}
