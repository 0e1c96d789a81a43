"""Timing: sides that alternate repetition by repetition, and the copy limit of the machine beside them."""

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

from jaxcomm.bench.team import Alone

MIN_REPS = 30
# A size above this may be measured fewer than MIN_REPS times, if --max-seconds says so.
LONG_BYTES = 1 << 20
_FEWEST_REPS = 5
# A cell that has its MIN_REPS goes on for this long: short ops get many repetitions, long ones few.
_ENOUGH_S = 1.5
_WARM_UPS = 2
# What takes less than this between processes is called a few times more before it is timed.
_SHORT_US = 1000
_UNCOUNTED = 5
LIMIT = "limit"  # the side that is no contender


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
    """How long `cores` threads need to copy n buffers of S bytes once.

    Every op measured here, except a barrier, reads or writes n buffers of S bytes, and most do both. For sums this is
    the bound of reading all operands and writing as much, with arithmetic for free. Below about 1 MiB the calls from
    Python take longer than the copies.
    """

    def __init__(self, num_buffers: int, size_bytes: int, fresh: bool):
        """fresh: into memory that is allocated for each copy, as results of a jit call are; else always the same."""
        self._fresh = fresh
        self._num_threads = min(cores(), num_buffers)
        self._sources = np.ones((num_buffers, size_bytes), np.uint8)
        self._results = None if fresh else np.zeros_like(self._sources)
        # At least 32 MiB in one go, so that starting the threads does not count.
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
        # The slowest thread's own time: how far the threads' starts lie apart does not count.
        return max(self._pool.map(self._work, range(self._num_threads)))


def stopwatch(function: Callable[[Any], Any], x: object, *, blocks: bool = False) -> Callable[[], float]:
    """Microseconds from the call to the moment when the result is there on all devices.

    blocks: the function returns no earlier than that; else its result is a jax.Array.
    """

    def measure_us() -> float:
        begin = time.perf_counter_ns()
        y = function(x)
        if not blocks:
            y.block_until_ready()
        end = time.perf_counter_ns()
        del y  # the clock has stopped
        return (end - begin) / 1e3

    return measure_us


def _order(names: list[str], rep: int) -> list[str]:
    """Everybody goes first in turn, and sees others go before it: nobody always finds the caches as the same has left
    them. The limit comes last."""
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
    team: Alone,
) -> dict[str, Times]:
    """Measures all sides in turn, over and over, so that each sees the same states of the machine.

    All processes of the team call it alike. They start each repetition together; its time is that of the slowest. Short
    ones follow calls of the same side that do not count, so that everybody is timed as in a loop of its own: the side
    before has left threads asleep and caches cold. After one call that does not count, in turns with raw MPI, psum of
    1 KiB took 13.5 us, jit of x + 1 took 7.4 and raw MPI 3.6; after five, 8.6, 5.0 and 2.3, as after twenty (two
    processes on 2 cores of an AMD EPYC, 2026-11).

    Args:
      sides: name -> function that measures one repetition in microseconds.
      reps: at most so many repetitions, and at least MIN_REPS of them.
      size_bytes: sizes above LONG_BYTES may stop earlier once `max_seconds` are spent.
      max_seconds: None for no such limit.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}

    last_us = dict.fromkeys(sides, math.inf)

    def take(name: str) -> float:
        if team.size > 1 and team.align(last_us[name] < _SHORT_US):
            for _ in range(_UNCOUNTED):
                team.align()
                sides[name]()
        team.align()
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
            if not team.align(not (enough or too_long)):
                break
    finally:
        if gc_was_enabled:
            gc.enable()
    everybodys = team.gather(times)
    return {name: Times(np.max([times[name] for times in everybodys], axis=0)) for name in sides}
