"""The command `validate-here`: how well the simulator predicts jaxcomm on the CPUs of this machine.

It measures all collectives, sizes and algorithms, fits parameters to few of the rows, and predicts the others: in one
node with the model of its processors (`cpus.py`), between nodes with the engine and the parameters of `calibrate()`.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm._core import plan, sim
from jaxcomm.simulate import cpus, here_rows, optimize
from jaxcomm.simulate.cluster import Cluster
from jaxcomm.simulate.here_rows import Row

# The rows that are fitted; all others are judged.
FIT_OPS = ("psum", "all_gather", "all_to_all")
FIT_BYTES = (32 << 10, 2 << 20)
# Of all rows together: median and p95 of the error, and the share of pairs of algorithms ordered right.
TARGET = (0.15, 0.50)
CHOICE_TARGET = 0.9
APART = 1.25  # measured times of a pair that count
_ITEM_BYTES = 4
_MAX_STEPS = 10_000_000
_SHAPES = ("1x8", "2x4", "4x2")


@dataclasses.dataclass(frozen=True)
class Judged:
    """A row with its prediction.

    Attributes:
      row: the measurement.
      predicted_us: time by the model.
      fitted: whether the parameters were fitted to this row.
    """

    row: Row
    predicted_us: float
    fitted: bool

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return float(np.log(self.predicted_us / self.row.time_us))


def is_fitted(row: Row) -> bool:
    return row.op in FIT_OPS and row.bytes in FIT_BYTES


def _request(row: Row) -> Any:
    made = here_rows.request(row.op, row.bytes, row.scope, row.ranks, row.ranks_per_node)
    made.chunk_count = row.chunk
    return made


def touched_bytes(row: Row) -> float:
    """Operands and results of all ranks of a node, which a call reads and writes."""
    ranks = row.ranks_per_node
    small = row.bytes / row.ranks
    first = small if row.op == "all_gather" else row.bytes
    second = small if row.op == "psum_scatter" else row.bytes
    return ranks * (first + second)


# Prior of each parameter: seconds and bytes/s in the middle of what machines have, and e-folds to either side.
_PRIOR = {
    "launch_s": (2e-5, 2.0),
    "overhead_s": (1e-6, 3.0),
    "latency_s": (1e-6, 3.0),
    "bytes_per_s": (5e9, 2.0),
    "network overhead_s": (2e-5, 2.0),
    "network latency_s": (1e-4, 2.0),
    "network bytes_per_s": (1e9, 3.0),
}


def _machine(base: Any, values: dict[str, float], rate: float) -> Any:
    """The machine of the cost model with this bandwidth of memory."""
    overhead_s, latency_s = values["overhead_s"], values.get("latency_s", 0.0)
    links = [
        ("self", overhead_s, rate, 0.0),
        ("node", overhead_s, rate, latency_s),
        (
            "network",
            values.get("network overhead_s", overhead_s),
            values.get("network bytes_per_s", rate),
            values.get("network latency_s", latency_s),
        ),
    ]
    return plan.Machine(links, values["launch_s"], base.ranks_per_processor, base.shared_network)


# The same for the parameters of `cpus.Cpus`, after the start of a call. The centres are round figures near the fits to
# benchmarks/results/here.csv (AMD EPYC guest, 2026-11), except that of `memory_of_all`, a guess that the fit keeps.
_CPUS_PRIOR = {
    "launch_s": (2e-5, 2.0),
    "step_s": (1e-7, 2.0),
    "private": (6e10, 2.0),
    "shared": (4e10, 2.0),
    "memory": (1.5e10, 2.0),
    "memory_of_all": (4e10, 2.0),
    "call_s": (2e-6, 2.0),
    "remote": (8e9, 2.0),
}


def _devices(row: Row) -> int:
    """Ranks of one process. The shape of several processes names them last: 2 x 4."""
    if row.scope == "process":
        return row.ranks
    found = re.search(r"x (\d+)$", row.shape)
    devices = int(found[1]) if found else 0
    if not devices or row.ranks % devices:
        raise ValueError(
            f"shape {row.shape!r} of {row.ranks} ranks: expected processes x devices of each process, such as '2 x 4'"
        )
    return devices


@functools.lru_cache(maxsize=4096)
def _work(row: Row) -> cpus.Work:
    return cpus.work(_request(row), row.algorithm, _ITEM_BYTES, _cpus(row, {}))


def _cpus(row: Row, values: dict[str, float]) -> cpus.Cpus:
    figures: dict[str, Any] = {name: middle for name, (middle, _) in _CPUS_PRIOR.items()} | values
    figures.pop("launch_s")
    return cpus.Cpus(_devices(row), row.processors, **figures)


def _fit_cpus(given: Sequence[Row]) -> Cluster:
    first = given[0]
    names = list(_CPUS_PRIOR) if first.scope == "node" else list(_CPUS_PRIOR)[:-2]  # one process reads its own memory
    target = np.log([row.time_us * 1e-6 for row in given])
    done = [_work(row) for row in given]

    def times(theta: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(theta).tolist(), strict=True))
        figures = _cpus(first, values)
        return np.log([values["launch_s"] + work.time_s(figures) for work in done])

    mean = np.log([_CPUS_PRIOR[name][0] for name in names])
    spread = np.array([_CPUS_PRIOR[name][1] for name in names])
    starts = [mean, mean + spread * (-1.0) ** np.arange(len(mean))]
    best = min(
        (optimize.minimize(times, target, mean, spread, start) for start in starts), key=lambda found: found.loss
    )
    values = dict(zip(names, np.exp(best.theta).tolist(), strict=True))
    figures = _cpus(first, values)
    made = plan.machine_of(first.scope, first.ranks, first.ranks_per_node)
    rate = figures.shared / 2  # of a copy: read and written
    links = [(name, figures.step_s, rate, 0.0) for name, *_ in made.links]
    machine = plan.Machine(links, values["launch_s"], max(1.0, first.ranks / first.processors), made.shared_network)
    cluster = Cluster.of_machine(machine, first.scope, first.ranks, first.ranks_per_node, "fitted: validate-here")
    return dataclasses.replace(cluster, cpus=figures)


def fit(rows: Sequence[Row]) -> Cluster:
    """The cluster that is fitted to rows of one shape: `cpus` in one node, the parameters of `calibrate` between nodes.

    Between nodes, each of both sizes has a bandwidth: small operands lie in a cache, and large ones in memory.

    Raises:
      ValueError: there are no rows to fit, or the shape does not name the devices of a process.
    """
    given = [row for row in rows if is_fitted(row)]
    found = {(row.op, row.bytes) for row in given}
    if lacking := [pair for pair in itertools.product(FIT_OPS, FIT_BYTES) if pair not in found]:
        sizes = " and ".join(map(str, FIT_BYTES))
        raise ValueError(
            f"{rows[0].shape}: expected rows of {', '.join(FIT_OPS)} with {sizes} bytes, to fit parameters; "
            f"missing: {', '.join(f'{op} of {size} bytes' for op, size in lacking)}"
        )
    return _fit_links(given) if given[0].scope == "network" else _fit_cpus(given)


def _fit_links(given: Sequence[Row]) -> Cluster:
    first = given[0]
    made = plan.machine_of(first.scope, first.ranks, first.ranks_per_node)
    # The processors may be those of another machine.
    sharing = max(1.0, first.ranks_per_node / first.processors)
    base = plan.Machine(made.links, made.launch_s, sharing, made.shared_network)
    names = [name for name in _PRIOR if name != "bytes_per_s"]
    requests = [(_request(row), row.algorithm) for row in given]
    touched = np.log([touched_bytes(row) for row in given])
    held = [max(size for size, row in zip(touched, given, strict=True) if row.bytes == b) for b in FIT_BYTES]

    def parts(theta: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        return dict(zip(names, np.exp(theta).tolist(), strict=False)), theta[len(names) :]

    def times(theta: np.ndarray) -> np.ndarray:
        values, rates = parts(theta)
        used = [_machine(base, values, rate) for rate in np.exp(np.interp(touched, held, rates)).tolist()]
        return np.log([
            plan.cost(made, name, _ITEM_BYTES, machine).time_s
            for (made, name), machine in zip(requests, used, strict=True)
        ])  # fmt: skip

    prior = [_PRIOR[name] for name in [*names, *["bytes_per_s"] * len(FIT_BYTES)]]
    mean, spread = np.log([middle for middle, _ in prior]), np.array([width for _, width in prior])
    target = np.log([row.time_us * 1e-6 for row in given])
    starts = [mean, mean + np.array([np.log(4) * (-1) ** i for i in range(len(mean))])]
    best = min(
        (optimize.minimize(times, target, mean, spread, start) for start in starts), key=lambda found: found.loss
    )
    values, rates = parts(best.theta)
    machine = _machine(base, values, float(np.exp(rates[0])))
    cluster = Cluster.of_machine(machine, first.scope, first.ranks, first.ranks_per_node, "fitted: validate-here")
    shares = tuple(
        (float(np.exp(size)), float(np.exp(rate - rates[0]))) for size, rate in zip(held, rates, strict=True)
    )
    return dataclasses.replace(cluster, memories=shares)


def _check_machine(shape: str, rows: Sequence[Row]) -> None:
    """Rows of one shape are of one measurement."""
    seen: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        for name in ("scope", "ranks", "ranks_per_node", "processors"):
            if getattr(row, name) != getattr(rows[0], name):
                raise ValueError(
                    f"{shape}: rows of different machines: {name} is {getattr(rows[0], name)} and "
                    f"{getattr(row, name)}; give one of the shapes another name"
                )
        key = row.op, row.algorithm, row.bytes
        if key in seen:
            raise ValueError(
                f"{shape}: two rows of {row.op} by {row.algorithm} of {row.bytes} bytes, {seen[key].time_us:g} and "
                f"{row.time_us:g} us; judge each measurement by itself, or give one of the shapes another name"
            )
        seen[key] = row


def _predict_us(cluster: Cluster, row: Row) -> float:
    if cluster.cpus is not None:
        return 1e6 * (cluster.launch_s + _work(row).time_s(cluster.cpus))
    native = cluster.holding(touched_bytes(row)).native()
    return 1e6 * sim.simulate(_request(row), row.algorithm, _ITEM_BYTES, native, "folded", _MAX_STEPS, 0).time_s


def judge(rows: Sequence[Row]) -> list[Judged]:
    """Fits each shape, and predicts all of its rows.

    Raises:
      ValueError: rows of one shape are of several measurements, or those to fit are missing.
    """
    shapes: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        shapes[row.shape].append(row)
    found = []
    for shape, members in shapes.items():
        _check_machine(shape, members)
        cluster = fit(members)
        found += [Judged(row, _predict_us(cluster, row), is_fitted(row)) for row in members]
    return found


def choices(judged: Sequence[Judged]) -> tuple[int, int]:
    """Pairs of algorithms of one op, size and shape whose measured times differ by 25 %: ordered right, and all."""
    groups: dict[tuple[str, str, int], list[Judged]] = defaultdict(list)
    for one in judged:
        groups[one.row.shape, one.row.op, one.row.bytes].append(one)
    right = pairs = 0
    for a, b in itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups.values()):
        measured = a.row.time_us / b.row.time_us
        if max(measured, 1 / measured) >= APART:
            pairs += 1
            right += (a.predicted_us - b.predicted_us) * (measured - 1) > 0
    return right, pairs


def _line(name: str, judged: Sequence[Judged]) -> str:
    error = np.array([one.error for one in judged])
    median, p90, p95 = 100 * np.quantile(np.expm1(np.abs(error)), [0.5, 0.9, 0.95])
    bias = 100 * np.expm1(np.median(error))
    right, pairs = choices(judged)
    share = f"{right} of {pairs}" if pairs else ""
    return f"| {name} | {len(judged)} | {median:.1f} | {p90:.1f} | {p95:.1f} | {bias:.1f} | {share} |"


def text(judged: Sequence[Judged], worst: int = 5) -> str:
    """Markdown: errors by shape, by op and by size, and the worst rows."""
    test = [one for one in judged if not one.fitted]
    lines = [
        f"Fitted: {', '.join(FIT_OPS)} of {' and '.join(map(str, FIT_BYTES))} bytes. The other rows are predicted.",
        "Errors in percent. Bias: median of predicted over measured, minus 1.",
        f"Order: of pairs of algorithms whose measured times differ by {APART - 1:.0%}, those that are ordered right.",
        "",
        "| rows | count | median | p90 | p95 | bias | order |",
        "|---|--:|--:|--:|--:|--:|--:|",
        _line("all", test),
    ]
    for key in ("shape", "op", "bytes"):
        for value in dict.fromkeys(getattr(one.row, key) for one in test):
            lines.append(
                _line(f"{value} bytes" if key == "bytes" else value, [o for o in test if getattr(o.row, key) == value])
            )
    lines += ["", "The largest errors:", "", "| shape | op | algorithm | bytes | measured, us | predicted, us |"]
    lines.append("|---|---|---|--:|--:|--:|")
    for one in sorted(test, key=lambda one: -abs(one.error))[:worst]:
        row = one.row
        lines.append(
            f"| {row.shape} | {row.op} | {row.algorithm} | {row.bytes} | {row.time_us:.1f} | {one.predicted_us:.1f} |"
        )
    return "\n".join(lines) + "\n"


def missed(judged: Sequence[Judged]) -> list[str]:
    """Targets that are not met."""
    test = [one for one in judged if not one.fitted]
    median, p95 = np.quantile(np.expm1(np.abs([one.error for one in test])), [0.5, 0.95])
    right, pairs = choices(test)
    checks = {"median": median <= TARGET[0], "p95": p95 <= TARGET[1], "order": right >= CHOICE_TARGET * pairs}
    return [name for name, met in checks.items() if not met]


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "validate-here", help="measure collectives on the CPUs of this machine, and predict them"
    )
    text = f"processes x devices of each, such as 2x4 (default: {' '.join(_SHAPES)})"
    parser.add_argument("--shapes", nargs="+", metavar="PxD", default=_SHAPES, help=text)
    text = "measurements, each of all collectives in another order; times are medians over rounds (default: 7)"
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help=text)
    text = "bytes of the larger of operand and result, separated by commas (default: 512 B to 16 MiB). The fit needs "
    text += " and ".join(map(str, FIT_BYTES))
    parser.add_argument("--sizes", default=",".join(map(str, here_rows.SIZES)), metavar="N,...", help=text)
    parser.add_argument("--out", default="here.csv", metavar="ROWS.csv", help="measured rows (default: here.csv)")
    text = "judge these measured rows instead of measuring; `here_rows` writes them on several hosts too"
    parser.add_argument("--rows", metavar="ROWS.csv", nargs="+", help=text)
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if a target is missed")


def _measure(args: argparse.Namespace) -> list[Row]:
    shapes = []
    for shape in args.shapes:
        processes, times, devices = shape.partition("x")
        if not times or not processes.isdigit() or not devices.isdigit() or int(processes) * int(devices) < 2:
            raise ValueError(
                f"--shapes: got {shape!r}, expected processes x devices of at least two ranks, such as 2x4"
            )
        shapes.append((processes, devices))
    if args.rounds < 1:
        raise ValueError(f"--rounds: got {args.rounds}, expected at least 1")
    if not all(part.isdigit() and int(part) for part in args.sizes.split(",")):
        raise ValueError(f"--sizes: got {args.sizes!r}, expected numbers of bytes separated by commas")
    if lacking := sorted(set(FIT_BYTES) - set(map(int, args.sizes.split(",")))):
        missing = " and ".join(map(str, lacking))
        raise ValueError(f"--sizes: got {args.sizes!r}, without {missing} bytes, which the fit needs")
    out = pathlib.Path(args.out)
    new = not out.exists()
    with out.open("a"):  # an error before the measurement; rows of an earlier one stay
        pass
    if new:
        out.unlink()
    rows: list[Row] = []
    for processes, devices in shapes:
        part = f"{args.out}.part"
        # Chunks follow the constants of the cost model, not a calibration of this machine.
        environment = dict(os.environ)
        environment |= {"JAX_PLATFORMS": "cpu", "JAXCOMM_CALIBRATION": ""}
        command = [sys.executable, "-m", "jaxcomm.run", "--processes", processes, "--devices", devices]
        command += ["-m", "jaxcomm.simulate.here_rows", "--out", part, "--name", f"{processes} x {devices}"]
        pathlib.Path(part).unlink(missing_ok=True)
        if subprocess.run([*command, "--rounds", str(args.rounds), "--sizes", args.sizes], env=environment).returncode:
            raise ValueError(f"validate-here: the measurement of {processes}x{devices} failed; see above")
        rows += here_rows.read(part)
        pathlib.Path(part).unlink()
        here_rows.write(args.out, rows)
    return rows


def command(args: argparse.Namespace) -> int:
    rows = [row for path in args.rows for row in here_rows.read(path)] if args.rows else _measure(args)
    if not rows:
        raise ValueError(f"validate-here: {', '.join(args.rows or [args.out])}: no rows")
    judged = judge(rows)
    if all(one.fitted for one in judged):
        raise ValueError("validate-here: all rows are fitted, so none is left to predict")
    print(text(judged), end="")
    found = missed(judged)
    print("Targets missed: " + (", ".join(found) if found else "none") + ".")
    return int(args.strict and bool(found))
