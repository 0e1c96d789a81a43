"""Results: one record per measurement and the context of the measurements."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import jaxcomm
from jaxcomm._measure import timing


@dataclasses.dataclass(frozen=True)
class Record:
    """One op at one size in one mode. Times are medians per op; GB are 1e9 bytes. None means not measured.

    Attributes:
      size_bytes, count: as in nccl-tests; 0 for ops without data.
      baseline: library that this record compares with, or None.
      limit_us: time to copy ranks * size_bytes once with all cores: into fresh memory in mode call, into reused memory
        in mode chain.
      chain: number of ops in one jit.
      wrong, baseline_wrong: elements that differ from the oracle, over all ranks and all checks.
      processes: number of processes. Times are those of the slowest process in each repetition.
    """

    op: str
    mode: str
    size_bytes: int
    count: int
    dtype: str
    ranks: int
    algorithm: str
    chain: int
    reps: int
    time_us: float | None = None
    p99_us: float | None = None
    algbw_gb_per_s: float | None = None
    busbw_gb_per_s: float | None = None
    wrong: int = 0
    baseline: str | None = None
    baseline_time_us: float | None = None
    baseline_p99_us: float | None = None
    baseline_wrong: int = 0
    limit_us: float | None = None
    processes: int = 1

    @property
    def speedup(self) -> float | None:
        """Time of the baseline / time of jaxcomm."""
        return _quotient(self.baseline_time_us, self.time_us)

    @property
    def over_limit(self) -> float | None:
        """Time of jaxcomm / copy limit."""
        return _quotient(self.time_us, self.limit_us)


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _git(*arguments: str) -> str | None:
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def context(program: Sequence[str], parameters: dict[str, Any]) -> dict[str, Any]:
    """Context of the measurements, to interpret and repeat them; commit and dirty are None outside a checkout.

    `program`: arguments of Python.
    """
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("jax", "jaxlib", "numpy")
    return {
        "command": shlex.join(["python", *program]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": None if commit is None or changes is None else changes != "",
        "machine": {"cpu": _cpu_model(), "cores": timing.cores(), "memory_gib": round(memory_bytes / 2**30, 1)},
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute before
        "versions": {
            "python": platform.python_version(),
            "jaxcomm": jaxcomm.__version__,
            **{name: version for name in names if (version := _version(name))},
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("JAX", "XLA_", "GLIBC_TUNABLES", "MALLOC_"))
        },
        "parameters": parameters,
    }


def save(path: str, run: dict[str, Any], records: Sequence[Record]) -> None:
    document = {**run, "records": [dataclasses.asdict(r) for r in records]}
    pathlib.Path(path).write_text(json.dumps(document, indent=1) + "\n")
