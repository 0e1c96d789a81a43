"""Command line and sweep: every op, size and mode, ours and jax.lax in turn."""

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jaxcomm
from jaxcomm.bench import cases, measure, records, report
from jaxcomm.bench.cases import COLLECTIVES, Collective, Group
from jaxcomm.bench.records import Record


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of bytes such as 256, 64K, 16M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def _axes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected sizes of mesh axes such as 8 or 2x4")
    return tuple(map(int, text.split("x")))


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from {low}")
        return int(text)

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.bench",
        description="Compares jaxcomm's collectives with those of jax.lax on forced CPU devices, and both with the "
        "speed at which the machine copies memory. Sizes are bytes per device as in nccl-tests: all_reduce buffer, "
        "all_gather result, reduce_scatter and all_to_all operand, permute message.",
    )

    def add(name: str, text: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", help=text, **options)

    names = f"{', '.join(COLLECTIVES)} or all (default)"
    add("op", f"what to measure: {names}", nargs="+", choices=[*COLLECTIVES, "all"], default=["all"], metavar="OP")
    add("begin", "smallest size (default: 256)", type=_bytes, default=256, metavar="BYTES")
    add("end", "largest size (default: 64M)", type=_bytes, default=64 << 20, metavar="BYTES")
    add("factor", "from one size to the next (default: 4)", type=_at_least(2), default=4)
    add("dtype", "element type (default: float32)", choices=cases.DTYPES, default="float32")
    text = "call: one op per jit call, host to host; chain: dependent ops inside one jit (default: both)"
    add("mode", text, choices=("call", "chain", "both"), default="both")
    add("chain", "ops of a chain (default: 16)", type=_at_least(1), default=16, metavar="K")
    text = "put lax.optimization_barrier between the ops of a chain, so that XLA computes every result in full"
    add("isolate", text, action="store_true")
    add("devices", "CPU devices to force (default: 8)", type=_at_least(1), metavar="N")
    text = "sizes of the mesh axes, outermost first; 2x4 runs hierarchical plans (default: one axis)"
    add("axes", text, type=_axes, metavar="AxB")
    add("algorithm", "jaxcomm's algorithm (default: its selection table chooses)")
    text = f"most repetitions; what takes long stops at {measure.MIN_REPS} (default: 200)"
    add("reps", text, type=_at_least(measure.MIN_REPS), default=200)
    text = f"stop a measurement above 1 MiB after S seconds, even short of {measure.MIN_REPS} repetitions"
    add("max-seconds", text, type=float, metavar="S")
    add("check-only", "compare with the oracle, measure nothing", action="store_true")
    add("json", "write records, machine, versions and parameters", metavar="FILE")
    add("plot", "draw time over size, one panel per op", metavar="FILE.png")
    add("table", "print Markdown tables of an earlier run's --json and stop", metavar="FILE.json")
    add("into", "with --table: put the tables between the marks of this file instead", metavar="FILE.md")
    return parser


def _sizes(begin: int, end: int, factor: int) -> list[int]:
    count = max(math.floor(math.log(end / begin, factor) + 1e-9), 0) + 1
    return [begin * factor**i for i in range(count)]


def _make_group(axes: tuple[int, ...]) -> Group:
    num_devices = math.prod(axes)
    with contextlib.suppress(RuntimeError):  # JAX has started: whether it has enough devices shows below
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        raise ValueError(f"--devices: {num_devices} are needed, JAX has already started with {len(devices)}")
    names = ("ranks",) if len(axes) == 1 else tuple(f"axis{i}" for i in range(len(axes)))
    mesh = Mesh(np.array(devices[:num_devices]).reshape(axes), names)
    return Group(mesh, names if len(names) > 1 else names[0])


class Cell:
    """One op, size and mode: its programs, compiled and checked, and their measurement."""

    def __init__(self, args: argparse.Namespace, group: Group, collective: Collective, size_bytes: int, mode: str):
        n, dtype = group.size, jnp.dtype(args.dtype)
        self.args, self.group, self.collective, self.mode = args, group, collective, mode
        self.size = cases.make_size(collective, size_bytes, dtype.itemsize, n)
        self.size_bytes = self.size.total * dtype.itemsize
        self.chain = 1 if mode == "call" else cases.longest_exact_chain(collective, dtype, n, args.chain)
        self.wrong = {"ours": 0, "lax": 0}
        self.xs = cases.make_operands(collective, self.size, dtype, n, self.chain)
        self.x = cases.place(self.xs, group)
        self.expected = collective.expect(self.xs, self.chain)
        operand = jax.ShapeDtypeStruct((self.size.operand,), dtype)
        self.algorithm = jaxcomm.explain(collective.name, operand, args.axes, algorithm=args.algorithm).algorithm
        self.programs = self._programs(self.chain)
        self.check(self.programs, self.expected)
        if self.chain > 1:
            # Some chains end where they began, which a program that does nothing does too: check one op as well.
            self.check(self._programs(1), collective.expect(self.xs, 1))

    def _programs(self, chain: int) -> dict[str, Callable]:
        options = {} if self.args.algorithm is None else {"algorithm": self.args.algorithm}
        sides = {"ours": (jaxcomm, options)}
        if self.collective.baseline is not None:
            sides["lax"] = (lax, {})
        return {
            side: cases.program(self.collective, lib, self.group, chain, keywords, self.args.isolate)
            for side, (lib, keywords) in sides.items()
        }

    def check(self, programs: dict[str, Callable], expected: Any) -> None:
        for side, function in programs.items():
            self.wrong[side] += cases.count_wrong(function(self.x), expected)

    def run(self) -> dict[str, measure.Times]:
        """Times per op of "ours", of "lax" and of the copy "limit", where there are such; data checked again."""
        sides = {side: measure.stopwatch(function, self.x) for side, function in self.programs.items()}
        with contextlib.ExitStack() as stack:
            if self.size_bytes:
                limit = measure.CopyLimit(self.group.size, self.size_bytes, fresh=self.mode == "call")
                sides["limit"] = stack.enter_context(limit).measure_us
            times = measure.alternate(
                sides, reps=self.args.reps, size_bytes=self.size_bytes, max_seconds=self.args.max_seconds
            )
        self.check(self.programs, self.expected)
        return {side: t if side == "limit" else t.per_op(self.chain) for side, t in times.items()}

    def record(self, times: dict[str, measure.Times]) -> Record:
        medians_us = {side: t.median_us for side, t in times.items()}
        p99s_us = {side: t.p99_us for side, t in times.items()}
        factor = self.collective.bus_factor
        algbw = self.size_bytes / medians_us["ours"] / 1e3 if "ours" in times and factor else None
        return Record(
            op=self.collective.name,
            mode=self.mode,
            size_bytes=self.size_bytes,
            count=self.size.count,
            dtype=self.args.dtype,
            ranks=self.group.size,
            algorithm=self.algorithm,
            chain=self.chain,
            reps=len(times["ours"].us) if "ours" in times else 0,
            time_us=medians_us.get("ours"),
            p99_us=p99s_us.get("ours"),
            algbw_gb_per_s=algbw,
            busbw_gb_per_s=factor(self.group.size) * algbw if factor and algbw else None,
            wrong=self.wrong["ours"],
            baseline=cases.baseline_name(self.collective),
            baseline_time_us=medians_us.get("lax"),
            baseline_p99_us=p99s_us.get("lax"),
            baseline_wrong=self.wrong["lax"],
            limit_us=medians_us.get("limit"),
        )


@contextlib.contextmanager
def _progress(total: int):
    """A function that prints a line, and one that moves the bar on; the bar shows on a terminal only."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield (lambda text: print(text, flush=True)), (lambda what: None)
        return
    with tqdm(total=total, unit="cell", disable=None, file=sys.stderr, dynamic_ncols=True, leave=False) as bar:

        def show(text: str) -> None:
            with tqdm.external_write_mode(file=sys.stdout):
                print(text, flush=True)

        def advance(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        yield show, advance


def _check(args: argparse.Namespace) -> None:
    """Fills in what depends on other arguments, and refuses what does not fit together."""
    args.op = list(COLLECTIVES) if "all" in args.op else list(dict.fromkeys(args.op))
    args.axes = args.axes or (args.devices or 8,)
    if args.devices and math.prod(args.axes) != args.devices:
        raise ValueError(f"--axes: got {args.axes}, expected sizes whose product is --devices {args.devices}")
    if args.end < args.begin:
        raise ValueError(f"--end: got {args.end} bytes, expected at least --begin, {args.begin}")
    for op in args.op:
        known = jaxcomm.algorithms(op)
        if args.algorithm not in (None, *known):
            raise ValueError(f"--algorithm: {op} has no {args.algorithm!r}, only {', '.join(known)}")


def _sweep(args: argparse.Namespace, group: Group, run: dict[str, Any]) -> list[Record]:
    modes = ("call", "chain") if args.mode == "both" else (args.mode,)
    cells = [
        (COLLECTIVES[op], size, mode)
        for op in args.op
        for mode in modes
        for size in (_sizes(args.begin, args.end, args.factor) if COLLECTIVES[op].sized else [0])
    ]
    results: list[Record] = []
    with _progress(len(cells)) as (show, advance):
        show(report.header(run))
        for collective, size_bytes, mode in cells:
            cell = Cell(args, group, collective, size_bytes, mode)
            results.append(cell.record({} if args.check_only else cell.run()))
            if mode == "chain" and cell.chain < args.chain:
                show(f"# {collective.name}: longer chains than {cell.chain} are not exact in {args.dtype}")
            show(report.line(results[-1]))
            if args.json:
                records.save(args.json, run, results)  # after every cell: an interrupted run keeps what it has
            del cell
            advance(f"{collective.name} {mode}")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status: 0, or 1 if any element was wrong on either side."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(argv)
    if args.into and not args.table:
        parser.error("--into needs --table")
    try:
        if args.table:
            table = report.markdown(*records.load(args.table))
            report.update_markdown(args.into, table) if args.into else print(table, end="")
            return 0
        _check(args)
        group = _make_group(args.axes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    keys = "op begin end factor dtype mode chain isolate algorithm reps max_seconds check_only"
    parameters = {key: getattr(args, key) for key in keys.split()}
    parameters |= {"axes": "x".join(map(str, args.axes)), "ranks": group.size}
    run = records.context(argv, parameters)
    results = _sweep(args, group, run)
    print(report.summary(results))
    if args.plot:
        report.plot(args.plot, run, results)
    return 1 if any(r.wrong or r.baseline_wrong for r in results) else 0
