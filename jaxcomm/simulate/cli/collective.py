"""The command `collective`: a prediction, what-ifs, comparisons, timelines and plots."""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from jaxcomm._request import splits_operand
from jaxcomm.simulate import collectives
from jaxcomm.simulate.cli import options
from jaxcomm.simulate.cluster import skew as skews
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.export import goal, perfetto, plots
from jaxcomm.simulate.nccl import predict as nccl

_TIMELINE_ENTRIES = 100_000


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    call = commands.add_parser("collective", help="time of a jaxcomm collective on a cluster, from its plan")
    call.add_argument("op", metavar="OP", help="public name, such as psum or all_to_all")
    call.add_argument(
        "--bytes", required=True, metavar="SIZES", help="operand of one rank: 64MiB, 1KiB,1MiB, 64KiB..4GiB"
    )
    call.add_argument("--ranks", metavar="N,...", help="numbers of ranks (default: one group of the first level)")
    call.add_argument("--cluster", required=True, metavar="CLUSTER", help=options.cluster_help())
    call.add_argument("--algorithm", metavar="NAME", help="default: that of lowest cost in the cost model")
    call.add_argument("--dtype", default="float32", help="element type (default: float32)")
    call.add_argument("--fidelity", default="folded", choices=collectives.FIDELITIES, help="default: folded")
    text = "other algorithms, or nccl-VERSION: its time by the plan model of `predict`"
    call.add_argument("--compare", metavar="NAME", nargs="+", default=[], help=text)
    call.add_argument("--goal", metavar="OUT.goal", help="schedule of the last plan, for LogGOPSim")
    options.add(call)
    call.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    clusters = options.clusters(args)
    numbers, sizes = _numbers(args, clusters[""]), options.sizes(args.bytes)
    dtype = _dtype(args.dtype)
    drawn = options.plots(args)
    several = len(numbers) * len(sizes) > 1
    if "waterfall" in drawn and (several or args.fidelity == "bounds"):
        raise ValueError("--plot waterfall: needs one size, one number of ranks, and a time")
    libraries = [name for name in args.compare if name.startswith("nccl-")]
    others = [name for name in args.compare if name not in libraries]
    options.check_plots(drawn, len(numbers) * len(sizes) * (len(clusters) + len(others)))
    asked = [("", name) for name in (args.algorithm, *others)]
    asked += [(label, args.algorithm) for label in clusters if label]
    points: list[plots.Point] = []
    loads: dict[str, list[plots.Load]] = {}
    times: dict[str, float] = {}
    last: collectives.Simulated | None = None
    for ranks, size in itertools.product(numbers, sizes):
        x, base = _operand(args.op, size, ranks, dtype), None
        for label, algorithm in asked:
            try:
                last = collectives.collective(
                    args.op,
                    x,
                    ranks,
                    cluster=clusters[label],
                    algorithm=algorithm,
                    fidelity=args.fidelity,
                    skew=skews.parse(args.skew) if args.skew else None,
                    seed=args.seed,
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
                series = ", ".join([name or "as given", *([f"{size} bytes, {ranks} ranks"] if several else [])])
                loads[series] = [
                    plots.Load(link, moved, moved / rate / last.time_s) for link, (moved, rate) in last.links.items()
                ]
                points.append(plots.Point(name or "jaxcomm", ranks, last.bytes, last.time_s, last.band))
        for name in libraries:
            other = nccl.predict(args.op, last.bytes if last else 0, ranks, clusters[""], str(dtype), name)
            row = {"op": args.op, "ranks": ranks, "bytes": other.bytes, "time_s": other.time_s, "band": other.band}
            options.print_one(args, name, other, row, base)
            points.append(plots.Point(name, ranks, other.bytes, other.time_s, other.band))
    if args.trace and last is not None:
        options.write(args.trace, perfetto.of_collective(last))
    if args.goal:
        schedule = goal.of(args.op, x, ranks, cluster=clusters[""], algorithm=args.algorithm)
        pathlib.Path(args.goal).write_text(goal.text(schedule), encoding="utf-8")
    title = f"{args.op} of {args.bytes} among {', '.join(map(str, numbers))} ranks of {clusters[''].name}"
    if "time" in drawn:
        plots.collectives(drawn["time"], title, points)
    if "links" in drawn:
        plots.links(drawn["links"], title, loads)
    if "waterfall" in drawn:
        options.waterfall(drawn["waterfall"], title, {name: times[name] for name in clusters})
    return 0


def _dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError:
        raise ValueError(f"--dtype: got {text!r}, expected an element type such as bfloat16") from None


def _numbers(args: argparse.Namespace, cluster: Cluster) -> list[int]:
    """The numbers of ranks that the command predicts."""
    try:
        return [int(part) for part in args.ranks.split(",")] if args.ranks else [cluster.levels[0].ranks]
    except ValueError:
        raise ValueError(f"--ranks: got {args.ranks!r}, expected numbers separated by commas") from None


def _operand(op: str, size: int, ranks: int, dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
    count = size // dtype.itemsize
    if splits_operand(op):
        count = -(-count // ranks) * ranks
    return jax.ShapeDtypeStruct((count,), dtype)
