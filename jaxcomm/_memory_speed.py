"""Measures the speed of caches, of memory, and of reads from other processes."""

import ctypes
import os
import threading
import time
from collections.abc import Callable

import numpy as np

# Copies from one half of these bytes to the other lie in a cache of a processor, in that of all, and in memory.
_PRIVATE_BYTES, _SHARED_BYTES, _MEMORY_BYTES = 512 << 10, 6 << 20, 128 << 20
_REMOTE_BYTES = (4 << 10, 1 << 20)
_REPETITIONS = 3


def _fastest_s(run: Callable[[], object], calls: int) -> float:
    """Other programs of the machine only add time."""
    run()
    times = []
    for _ in range(_REPETITIONS):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


def _copy(total: int) -> Callable[[], object]:
    src, dst = np.ones(total // 2, np.uint8), np.zeros(total // 2, np.uint8)
    return lambda: np.copyto(dst, src)


def _together(copies: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=copy) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _remote_s(size: int) -> float | None:
    """Time of one read by the system call that reads other processes, here of this one; None where there is none."""

    class Range(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        return None
    src, dst = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    own, other = (Range(array.ctypes.data, size) for array in (dst, src))
    read.restype = ctypes.c_ssize_t
    arguments = (os.getpid(), ctypes.byref(own), ctypes.c_ulong(1), ctypes.byref(other), ctypes.c_ulong(1), 0)
    if read(*arguments) != size:
        return None
    return _fastest_s(lambda: read(*arguments), 64)


def measure() -> dict[str, float]:
    """Measures for less than a second on an idle machine.

    Returns:
      Values of ``jaxcomm.simulate.cpus.Cpus`` by name: "private", "shared", "memory", "memory_of_all", and, where
      processes can read each other, "call_s" and "remote". Bytes per second, read and written, and seconds.
    """
    private = _PRIVATE_BYTES / _fastest_s(_copy(_PRIVATE_BYTES), 64)
    shared = _SHARED_BYTES / _fastest_s(_copy(_SHARED_BYTES), 4)
    # A copy from memory writes as fast as into the shared cache.
    one_s = _fastest_s(_copy(_MEMORY_BYTES), 1)
    read_s = max(one_s - _MEMORY_BYTES / 2 / shared, one_s / 2)
    processors = len(os.sched_getaffinity(0))
    copies = [_copy(_MEMORY_BYTES) for _ in range(processors)]
    found = {
        "private": private,
        "shared": shared,
        "memory": _MEMORY_BYTES / 2 / read_s,
        "memory_of_all": processors * _MEMORY_BYTES / _fastest_s(lambda: _together(copies), 1),
    }
    short_s, long_s = map(_remote_s, _REMOTE_BYTES)
    if short_s is not None and long_s is not None and long_s > short_s:
        found["remote"] = (_REMOTE_BYTES[1] - _REMOTE_BYTES[0]) / (long_s - short_s)
        found["call_s"] = max(short_s - _REMOTE_BYTES[0] / found["remote"], 0.0)
    return found
