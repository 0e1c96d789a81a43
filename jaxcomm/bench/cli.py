"""Command line of python -m jaxcomm.bench."""

import argparse
import contextlib
import functools
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxcomm
from jaxcomm._config import config
from jaxcomm._measure import collectives, size_text, timing
from jaxcomm._measure.collectives import COLLECTIVES, Group
from jaxcomm._measure.process_group import ProcessGroup
from jaxcomm._processes import kv_store
from jaxcomm.bench import records, sweep
from jaxcomm.bench.records import Record


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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.bench",
        description="Compares jaxcomm's collectives with those of jax.lax on forced CPU devices, and both with the "
        "memory copy speed of the machine. Under jaxcomm.run, compares them with jax.lax on gloo. "
        "Sizes are bytes per device as in nccl-tests: all_reduce buffer, all_gather result, reduce_scatter and "
        "all_to_all operand, permute message.",
    )

    def add(name: str, text: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", help=text, **options)

    names = f"{', '.join(COLLECTIVES)} or all (default)"
    add("op", f"ops to measure: {names}", nargs="+", choices=[*COLLECTIVES, "all"], default=["all"], metavar="OP")
    add("begin", "smallest size (default: 256)", type=size_text.parse, default=256, metavar="BYTES")
    add("end", "largest size (default: 64M)", type=size_text.parse, default=64 << 20, metavar="BYTES")
    add("factor", "ratio of one size to the previous one (default: 4)", type=_at_least(2), default=4)
    add("dtype", "element type (default: float32)", choices=collectives.DTYPES, default="float32")
    text = "call: one op per jit call, host to host; chain: dependent ops inside one jit; default: both"
    add("mode", text + ", between processes: call", choices=("call", "chain", "both"))
    add("chain", "ops of a chain (default: 16)", type=_at_least(1), default=16, metavar="K")
    text = "put lax.optimization_barrier between the ops of a chain, so that XLA computes every result in full"
    add("isolate", text, action="store_true")
    text = "sizes of the mesh axes of forced CPU devices, outermost first; 2x4 runs hierarchical plans (default: 8)"
    add("axes", text, type=_axes, metavar="AxB")
    add("algorithm", "jaxcomm's algorithm (default: its selection table chooses)")
    text = f"maximum of repetitions; long measurements stop at {timing.MIN_REPS} (default: 200)"
    add("reps", text, type=_at_least(timing.MIN_REPS), default=200)
    text = f"stop a measurement above 1 MiB after S seconds, even before {timing.MIN_REPS} repetitions"
    add("max-seconds", text, type=_seconds, metavar="S")
    add("check-only", "compare with the oracle, measure nothing", action="store_true")
    add("json", "write records, machine, versions and parameters", metavar="FILE")
    return parser


def _make_group(axes: tuple[int, ...]) -> Group:
    num_devices = math.prod(axes)
    with contextlib.suppress(RuntimeError):  # JAX has started: the number of devices is checked below
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        raise ValueError(f"--axes: {num_devices} devices are needed, but JAX has already started with {len(devices)}")
    names = ("ranks",) if len(axes) == 1 else tuple(f"axis{i}" for i in range(len(axes)))
    mesh = Mesh(np.array(devices[:num_devices]).reshape(axes), names)
    return Group(mesh, names if len(names) > 1 else names[0])


def _check(args: argparse.Namespace, processes: int) -> None:
    """Sets defaults that depend on other arguments. Raises ValueError if arguments contradict each other."""
    args.op = list(COLLECTIVES) if "all" in args.op else list(dict.fromkeys(args.op))
    args.mode = args.mode or ("both" if processes == 1 else "call")
    if processes > 1:
        if args.axes is not None:
            raise ValueError("--axes is for one process; jaxcomm.run sets the devices of several")
    else:
        args.axes = args.axes or (8,)
    if args.end < args.begin:
        raise ValueError(f"--end: got {args.end} bytes, expected at least --begin, {args.begin}")
    for op in args.op:
        known = jaxcomm.algorithms(op)
        if args.algorithm not in (None, *known):
            raise ValueError(f"--algorithm: {op} has no {args.algorithm!r}; pass one of {', '.join(known)}")


def _join(folder: pathlib.Path, size: int) -> ProcessGroup:
    """Joins the processes of this program, all on this machine, in a folder of process 0."""
    if jax.process_index() == 0:
        ProcessGroup.prepare(folder, size)
        kv_store.kv_set("bench/folder", str(folder))
    return ProcessGroup(pathlib.Path(kv_store.kv_wait("bench/folder", config().timeout_s)), jax.process_index(), size)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status: 0, or 1 if any library gave a wrong element."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(argv)
    size = jaxcomm.distributed.initialize()
    try:
        _check(args, size)
        group = _make_group(args.axes) if size == 1 else Group(Mesh(np.array(jax.devices()), "ranks"), "ranks")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    keys = "op begin end factor dtype mode chain isolate algorithm reps max_seconds check_only"
    parameters = {key: getattr(args, key) for key in keys.split()}
    program = ["-m", "jaxcomm.bench", *argv]
    if size == 1:
        parameters |= {"axes": "x".join(map(str, args.axes)), "ranks": group.size}
    else:
        shape = size, group.size // size
        parameters |= {"processes": "x".join(map(str, shape))}
        program = ["-m", "jaxcomm.run", f"--processes={shape[0]}", f"--devices={shape[1]}", *program]
    run = records.context(program, parameters)
    results: list[Record] = []
    save = functools.partial(records.save, args.json, run, results) if args.json else None
    with tempfile.TemporaryDirectory(prefix="jaxcomm-bench-") as folder:
        processes = _join(pathlib.Path(folder), size) if size > 1 else ProcessGroup()
        sweep.sweep(args, processes, group, run, results, save)
        processes.align()  # process 0 removes the folder
    if processes.rank == 0:
        print(f"\n{len(results)} measurements, {sum(r.wrong for r in results)} wrong elements")
    return 1 if any(r.wrong or r.baseline_wrong for r in results) else 0
