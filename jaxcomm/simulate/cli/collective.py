"""The command `collective`: a prediction, what-ifs, comparisons, a timeline and plots."""

import argparse
import dataclasses
import itertools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._core import plan
from jaxcomm._measure import size_text
from jaxcomm._request import native_name, splits_operand
from jaxcomm.simulate import collectives
from jaxcomm.simulate.cli import options
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.export import perfetto, plots
from jaxcomm.simulate.nccl import predict as nccl

_TIMELINE_ENTRIES = 100_000


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    call = commands.add_parser("collective", help="time of a jaxcomm collective on a cluster, from its plan")
    call.add_argument("op", metavar="OP", help="public name, such as psum or all_to_all")
    text = "operand of one rank: 64MiB (64 x 2^20), 64MB (64 x 10^6), 1KiB,1MiB, or 64KiB..4GiB"
    call.add_argument("--bytes", required=True, type=size_text.parse_list, metavar="SIZES", help=text)
    call.add_argument("--ranks", metavar="N,...", help="numbers of ranks (default: one group of the first level)")
    call.add_argument("--cluster", required=True, metavar="CLUSTER", help=options.cluster_help())
    call.add_argument("--algorithm", metavar="NAME", help="default: that of lowest cost in the cost model")
    call.add_argument("--dtype", default="float32", help="element type (default: float32)")
    call.add_argument("--fidelity", default="folded", choices=collectives.FIDELITIES, help="default: folded")
    text = "other algorithms, or nccl-VERSION: the time of NCCL, from published timings"
    call.add_argument("--compare", metavar="NAME", nargs="+", default=[], help=text)
    options.add(call)
    call.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    clusters = options.clusters(args)
    numbers, dtype = _numbers(args, clusters[""]), _dtype(args.dtype)
    for size in args.bytes:
        if size % dtype.itemsize:
            raise ValueError(f"--bytes: {size} is not a multiple of the {dtype.itemsize} bytes of {dtype}")
    drawn = options.outputs(args)
    several = len(numbers) * len(args.bytes) > 1
    if drawn and args.fidelity == "bounds":
        raise ValueError("--plot: --fidelity bounds gives no times")
    if "waterfall" in drawn and several:
        raise ValueError("--plot waterfall: needs one size and one number of ranks")
    libraries, others = _compared(args)
    cases = [("", name) for name in (args.algorithm, *others)]
    cases += [(label, args.algorithm) for label in clusters if label]
    points: list[plots.Point] = []
    times: dict[str, float] = {}
    last: collectives.Simulated | None = None
    for ranks, size in itertools.product(numbers, args.bytes):
        x, base = _operand(args.op, size, ranks, dtype), None
        for label, algorithm in cases:
            try:
                last = collectives.collective(
                    args.op,
                    x,
                    ranks,
                    cluster=clusters[label],
                    algorithm=algorithm,
                    fidelity=args.fidelity,
                    max_entries=_TIMELINE_ENTRIES if args.trace else 0,
                    symmetric_buffers=args.symmetric_buffers,
                )
            except ValueError as error:
                if algorithm == args.algorithm:
                    raise
                print(f"--compare {algorithm}: {error}", file=sys.stderr)
                continue
            name = label or (f"algorithm {algorithm}" if algorithm != args.algorithm else "")
            row = {f.name: getattr(last, f.name) for f in dataclasses.fields(last) if f.name != "timeline"}
            options.print_one(args, name, last, row, base)
            base = base or last.time_s
            if last.time_s is not None:
                times[name] = last.time_s
                series = name or (f"algorithm {algorithm}" if algorithm else "jaxcomm")
                points.append(plots.Point(series, ranks, last.bytes, last.time_s, last.interval))
        for name in libraries:
            other = nccl.predict(args.op, last.bytes if last else 0, ranks, clusters[""], name)
            row = {"op": args.op, "ranks": ranks, "bytes": other.bytes, "time_s": other.time_s}
            options.print_one(args, name, other, row | {"interval": other.interval}, base)
            points.append(plots.Point(name, ranks, other.bytes, other.time_s, other.interval))
    if args.trace and last is not None:
        options.write(args.trace, perfetto.of_collective(last))
    if "time" in drawn:
        plots.collectives(drawn["time"], f"{args.op} on {clusters[''].name}", points)
    if "waterfall" in drawn:
        title = f"{args.op} of {size_text.text(args.bytes[0])} among {numbers[0]} ranks of {clusters[''].name}"
        options.waterfall(drawn["waterfall"], title, {name: times[name] for name in clusters})
    return 0


def _compared(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The versions of NCCL and the algorithms of --compare."""
    known = [name for name, _ in plan.algorithms(native_name(args.op))]
    libraries = [name for name in args.compare if re.fullmatch(r"nccl-\d+(\.\d+)*", name)]
    others = [name for name in args.compare if name not in libraries]
    for name in others:
        if name not in known:
            expected = f"expected nccl-VERSION such as nccl-2.28, or an algorithm of {args.op}: {', '.join(known)}"
            raise ValueError(f"--compare: got {name!r}, {expected}")
    return libraries, others


def _dtype(text: str) -> np.dtype[Any]:
    try:
        if jnp.isdtype(dtype := np.dtype(text), ("bool", "numeric")):
            return dtype
    except TypeError:
        pass
    raise ValueError(f"--dtype: got {text!r}, expected an element type such as bfloat16")


def _numbers(args: argparse.Namespace, cluster: Cluster) -> list[int]:
    """The numbers of ranks that the command predicts."""
    if args.ranks is None:
        return [cluster.levels[0].ranks]
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", args.ranks):
        raise ValueError(f"--ranks: got {args.ranks!r}, expected positive numbers separated by commas")
    return [int(part) for part in args.ranks.split(",")]


def _operand(op: str, size: int, ranks: int, dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
    count = size // dtype.itemsize
    if splits_operand(op):
        count = -(-count // ranks) * ranks
    return jax.ShapeDtypeStruct((count,), dtype)
