"""Resources of a process, for tests that they don't grow."""

import ctypes
import gc
import os


def usage():
    """Resources of this process, without memory that allocators keep for reuse."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps") as file:
        mappings = len(file.readlines())
    return {
        "private KiB": int(status["RssAnon"].split()[0]),
        "shared KiB": int(status["RssShmem"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "mappings": mappings,
    }
