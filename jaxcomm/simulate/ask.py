"""The commands `collective` and `step`: a prediction, what-ifs, comparisons, traces and plots."""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcomm.simulate import calls, goal, hlo, nccl, plot, steps, trace
from jaxcomm.simulate import skew as skews
from jaxcomm.simulate.cluster import Cluster
from jaxcomm.simulate.predictions import Step

_TRACE_ENTRIES = 100_000


def add_commands(commands: Any) -> None:
    """Adds both commands to a parser."""
    clusters = f"TOML file, or one of {', '.join(Cluster.names())}"

    call = commands.add_parser("collective", help="time of a jaxcomm collective on a cluster, from its plan")
    call.add_argument("op", metavar="OP", help="public name, such as psum or all_to_all")
    call.add_argument(
        "--bytes", required=True, metavar="SIZES", help="operand of one rank: 64MiB, 1KiB,1MiB, 64KiB..4GiB"
    )
    call.add_argument("--ranks", metavar="N,...", help="numbers of ranks (default: one group of the first level)")
    call.add_argument("--cluster", required=True, metavar="CLUSTER", help=clusters)
    call.add_argument("--algorithm", metavar="NAME", help="default: that of lowest cost in the cost model")
    call.add_argument("--dtype", default="float32", help="element type (default: float32)")
    call.add_argument("--fidelity", default="folded", choices=calls.FIDELITIES, help="default: folded")
    text = "other algorithms, or nccl-VERSION: its time by the plan model of `predict`"
    call.add_argument("--compare", metavar="NAME", nargs="+", default=[], help=text)
    call.add_argument("--goal", metavar="OUT.goal", help="schedule of the last plan, for LogGOPSim")
    _add_shared(call)

    step = commands.add_parser("step", help="time of a step on a cluster, from its jaxpr")
    text = "FILE.py:FUNCTION or MODULE:FUNCTION; FUNCTION(mesh) returns the step and a tuple of its arguments"
    step.add_argument("target", metavar="TARGET", nargs="?", help=text)
    text = "axes, outermost first: data=16,model=8; optional with --hlo"
    step.add_argument("--mesh", metavar="AXIS=SIZE,...", help=text)
    step.add_argument("--hlo", metavar="FILE", help="HLO text instead of TARGET: compiled.as_text() of several devices")
    text = "times of kernels from jax.profiler, for --hlo: FILE.trace.json.gz"
    step.add_argument("--profile", metavar="FILE", help=text)
    step.add_argument("--cluster", required=True, metavar="CLUSTER", help=clusters)
    step.add_argument("--while-trips", type=int, default=1, metavar="N", help="iterations of while loops (default: 1)")
    step.add_argument("--fidelity", default="folded", choices=("folded", "full"), help="default: folded")
    step.add_argument("--compare", metavar="CLUSTER", nargs="+", default=[], help="other clusters")
    _add_shared(step)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    text = "a figure of the cluster, such as leaf.bandwidth=800Gb/s; several form one what-if, separated by commas"
    parser.add_argument("--what-if", metavar="KEY=VALUE", nargs="+", default=[], help=text)
    text = "leaf[3]=0.5 (share left; lost: 0), leaf.planes=1 (lost), rank[7]=1.5 (times as slow), rank[7]=lost"
    parser.add_argument("--fault", metavar="FAULT", nargs="+", default=[], help=text)
    text = "arrivals: normal:TIME, exponential:TIME, lognormal:TIME:SIGMA, or one per rank of the group (0us,5us,...)"
    parser.add_argument("--skew", metavar="SKEW", help=text)
    text = "of arrivals drawn from a distribution (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    text = "peers access operands and results where XLA has them; otherwise data passes through an arena"
    parser.add_argument("--symmetric-buffers", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object per prediction")
    parser.add_argument("--trace", metavar="OUT.json", help="timeline of the last prediction, for ui.perfetto.dev")
    text = "plots, which need matplotlib: OUT.png of times, links=OUT.png of link loads, waterfall=OUT.png of what-ifs"
    parser.add_argument("--plot", metavar="[KIND=]OUT.png", nargs="+", default=[], help=text)


def sizes(text: str) -> list[int]:
    """Bytes of "64MiB", "1KiB,1MiB" or "64KiB..4GiB" (every power of two in between)."""

    def one(part: str) -> int:
        found = re.fullmatch(r"\s*(\d+)\s*([KMGT]?i?B?)\s*", part)
        scale = {"": 1, "K": 10, "M": 20, "G": 30, "T": 40}
        if not found or (unit := found[2].rstrip("B").rstrip("i")) not in scale:
            raise ValueError(f"--bytes: got {part!r}, expected a size such as 4096, 64KiB or 1GiB")
        return int(found[1]) << scale[unit] if unit else int(found[1])

    found = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        size = one(first)
        found.append(size)
        while last and size > 0 and (size := 2 * size) <= one(last):
            found.append(size)
    return found


def _changes(text: str) -> dict[str, str]:
    """Values by key of "leaf.bandwidth=100,leaf.latency=2us"."""
    changes = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"--what-if: got {part!r}, expected KEY=VALUE such as leaf.bandwidth=800Gb/s")
        # A unit is apart from its number in the file.
        changes[key.strip().removeprefix("level.")] = re.sub(
            r"^([-+\d.]+(?:[eE][-+]?\d+)?)\s*([a-zA-Z/]+)$", r"\1 \2", value.strip()
        )
    return changes


_PLOTS = ("time", "links", "waterfall")
_ALL = "all what-ifs"


def _plots(args: argparse.Namespace) -> dict[str, str]:
    """Paths by kind of plot."""
    found: dict[str, str] = {}
    for text in args.plot:
        kind, equals, path = text.partition("=")
        kind, path = (kind, path) if equals and kind in _PLOTS else ("time", text)
        if not path or kind in found or pathlib.Path(path) in map(pathlib.Path, found.values()):
            raise ValueError(f"--plot: got {text!r}, expected OUT.png, links=OUT.png or waterfall=OUT.png, once each")
        if not pathlib.Path(path).parent.is_dir() or pathlib.Path(path).is_dir():
            raise ValueError(f"--plot: {path}: expected a file in a directory that exists")
        found[kind] = path
    if "waterfall" in found and not args.what_if:
        raise ValueError("--plot waterfall: needs --what-if")
    return found


def _check_plots(plots: dict[str, str], predictions: int) -> None:
    if "links" in plots and predictions > plot.MAX_SERIES:
        raise ValueError(f"--plot links: got {predictions} predictions, expected at most {plot.MAX_SERIES}")


def _clusters(args: argparse.Namespace) -> dict[str, Cluster]:
    """The cluster, and one for each what-if, by the text of the change. A waterfall needs all of them at once too."""
    broken: dict[str, str] = {}
    for text in args.fault:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--fault: got {text!r}, expected one such as leaf[3]=0.5 or rank[7]=lost")
        if f"fault.{key.strip()}" in broken:
            raise ValueError(f"--fault: {text!r} contradicts an earlier fault of the same place")
        broken[f"fault.{key.strip()}"] = value.strip()
    made = {"": Cluster.load(args.cluster, broken)}
    for text in args.what_if:
        made[text] = Cluster.load(args.cluster, {**broken, **_changes(text)})
    if "waterfall" in _plots(args):
        every: dict[str, str] = {}
        for text in args.what_if:
            if twice := every.keys() & _changes(text).keys():
                raise ValueError(f"--plot waterfall: {min(twice)} is in two what-ifs, which cannot hold at once")
            every |= _changes(text)
        made[_ALL] = Cluster.load(args.cluster, {**broken, **every})
    return made


def _waterfall(path: str, title: str, times: dict[str, float]) -> None:
    alone = {label: time_s for label, time_s in times.items() if label not in ("", _ALL)}
    plot.waterfall(path, title, times[""], alone, times[_ALL])


def _print(args: argparse.Namespace, label: str, found: Any, row: dict[str, Any], base: float | None) -> None:
    if args.json:
        print(json.dumps({"what_if": label, **row} if label else row), flush=True)
        return
    if label:
        print(f"--- {label}")
    print(found, flush=True)
    if base and label and found.time_s is not None:
        print(f"compared    {found.time_s / base:.3f} times the first time")


def collective(args: argparse.Namespace) -> int:
    clusters = _clusters(args)
    try:
        dtype = np.dtype(args.dtype)
    except TypeError:
        raise ValueError(f"--dtype: got {args.dtype!r}, expected an element type such as bfloat16") from None
    try:
        numbers = [int(part) for part in args.ranks.split(",")] if args.ranks else [clusters[""].levels[0].ranks]
    except ValueError:
        raise ValueError(f"--ranks: got {args.ranks!r}, expected numbers separated by commas") from None
    plots, loads, times = _plots(args), {}, {}
    if "waterfall" in plots and (len(numbers) > 1 or len(sizes(args.bytes)) > 1 or args.fidelity == "bounds"):
        raise ValueError("--plot waterfall: needs one size, one number of ranks, and a time")
    others = [name for name in args.compare if not nccl.is_name(name)]
    _check_plots(plots, len(numbers) * len(sizes(args.bytes)) * (len(clusters) + len(others)))
    points: list[plot.Point] = []
    last: calls.Simulated | None = None
    for ranks in numbers:
        for size in sizes(args.bytes):
            count = size // dtype.itemsize
            if args.op in ("all_to_all", "psum_scatter"):  # n equal blocks
                count = -(-count // ranks) * ranks
            x = jax.ShapeDtypeStruct((count,), dtype)
            base = None
            for label, cluster in clusters.items():
                for algorithm in (args.algorithm, *(others if not label else ())):
                    try:
                        last = calls.collective(
                            args.op,
                            x,
                            ranks,
                            cluster=cluster,
                            algorithm=algorithm,
                            fidelity=args.fidelity,
                            skew=skews.parse(args.skew) if args.skew else None,
                            seed=args.seed,
                            max_entries=_TRACE_ENTRIES if args.trace else 0,
                            symmetric_buffers=args.symmetric_buffers,
                        )
                    except ValueError as error:
                        if algorithm == args.algorithm:
                            raise
                        print(f"--compare {algorithm}: {error}", file=sys.stderr)
                        continue
                    name = label or (f"algorithm {algorithm}" if algorithm != args.algorithm else "")
                    row = {f.name: getattr(last, f.name) for f in dataclasses.fields(last) if f.name != "timeline"}
                    _print(args, name, last, row, base)
                    base = base or last.time_s
                    if last.time_s is not None:
                        times[name] = last.time_s
                        several = len(numbers) > 1 or len(sizes(args.bytes)) > 1
                        series = ", ".join([name or "as given", *([f"{size} bytes, {ranks} ranks"] if several else [])])
                        loads[series] = [
                            plot.Load(link, moved, moved / rate / last.time_s)
                            for link, (moved, rate) in last.links.items()
                        ]
                        points.append(plot.Point(name or "jaxcomm", ranks, last.bytes, last.time_s, last.band))
            for name in filter(nccl.is_name, args.compare):
                other = nccl.predict(args.op, last.bytes if last else 0, ranks, clusters[""], str(dtype), name)
                row = {"op": args.op, "ranks": ranks, "bytes": other.bytes, "time_s": other.time_s, "band": other.band}
                _print(args, name, other, row, base)
                points.append(plot.Point(name, ranks, other.bytes, other.time_s, other.band))
    if args.trace and last is not None:
        _write(args.trace, trace.of_collective(last))
    if args.goal:
        schedule = goal.of(args.op, x, ranks, cluster=clusters[""], algorithm=args.algorithm)
        pathlib.Path(args.goal).write_text(goal.text(schedule), encoding="utf-8")
    title = f"{args.op} of {args.bytes} among {', '.join(map(str, numbers))} ranks of {clusters[''].name}"
    if "time" in plots:
        plot.collectives(plots["time"], title, points)
    if "links" in plots:
        plot.links(plots["links"], title, loads)
    if "waterfall" in plots:
        _waterfall(plots["waterfall"], title, {name: times[name] for name in clusters})
    return 0


def _mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit() or not int(size) or not name.strip() or name.strip() in mesh:
            raise ValueError(f"--mesh: got {part!r}, expected AXIS=SIZE with distinct axes, such as data=16,model=8")
        mesh[name.strip()] = int(size)
    return mesh


def _target(text: str) -> Callable[..., Any]:
    """The function that a file or a module holds."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"step: got {text!r}, expected FILE.py:FUNCTION or MODULE:FUNCTION")
    if place.endswith(".py"):
        path = pathlib.Path(place)
        if not path.is_file():
            raise ValueError(f"step: {place}: No such file")
        sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None  # of a file that ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"step: {place}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"step: {place} has no function {name}")
    return found  # type: ignore[no-any-return]


def _workload(args: argparse.Namespace) -> Callable[[Cluster], Step]:
    """The prediction of the given step for a cluster."""
    if (args.target is None) == (args.hlo is None):
        raise ValueError(f"step: expected one of TARGET and --hlo, got {'none' if args.hlo is None else 'both'}")
    if args.profile and not args.hlo:
        raise ValueError("step: --profile needs --hlo, the text of the program of the profile")
    if args.hlo and (args.skew or args.symmetric_buffers):
        raise ValueError("step: --skew and --symmetric-buffers need a TARGET")
    mesh = _mesh(args.mesh) if args.mesh else None
    if args.hlo:
        text = pathlib.Path(args.hlo).read_text(encoding="utf-8", errors="replace")
        return lambda cluster: hlo.of_text(
            text,
            cluster=cluster,
            mesh=mesh,
            while_trips=args.while_trips,
            fidelity=args.fidelity,
            profiled=args.profile,
            file=args.hlo,
        )
    if mesh is None:
        raise ValueError("step: --mesh is missing, such as --mesh data=16,model=8")
    target = _target(args.target)
    try:
        made = target(jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh)))
    except KeyError as error:
        if not error.args or not isinstance(error.args[0], str) or error.args[0] in mesh:
            raise
        raise ValueError(f"step: {args.target}: --mesh {args.mesh} has no axis {error.args[0]!r}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], tuple | list):
        raise ValueError(f"step: {args.target} must return the step and a tuple of its arguments, got {made!r:.200}")
    step_fn, arguments = made

    def predict(cluster: Cluster) -> Step:
        try:
            return steps.step(
                step_fn,
                arguments,
                mesh=mesh,
                cluster=cluster,
                while_trips=args.while_trips,
                fidelity=args.fidelity,
                skew=skews.parse(args.skew) if args.skew else None,
                seed=args.seed,
                symmetric_buffers=args.symmetric_buffers,
            )
        except steps.StepError as error:
            raise ValueError(f"{args.target}: {error}") from None

    return predict


def step(args: argparse.Namespace) -> int:
    clusters, plots = _clusters(args), _plots(args)
    made_of = tuple(clusters)
    for name in args.compare:
        clusters[f"cluster {name}"] = Cluster.load(name)
    _check_plots(plots, len(clusters))
    predict = _workload(args)
    found: dict[str, Step] = {}
    for label, cluster in clusters.items():
        found[label] = predict(cluster)
        _print(args, label, found[label], found[label].row(), found[""].time_s)
    if args.trace:
        _write(args.trace, trace.of_step(list(found.values())[-1]))
    title = f"step on {' x '.join(f'{name} {size}' for name, size in found[''].mesh.items())} of {clusters[''].name}"
    if "time" in plots:
        plot.steps(plots["time"], title, found)
    if "links" in plots:
        plot.links(plots["links"], title, {name or "as given": _loads(one) for name, one in found.items()})
    if "waterfall" in plots:
        _waterfall(plots["waterfall"], title, {name: one.time_s for name, one in found.items() if name in made_of})
    return 0


def _loads(found: Step) -> list[plot.Load]:
    """Of all collectives of a step together."""
    moved: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    for row in found.collectives:
        for link, (size, rate) in row.simulated.links.items():
            moved[link] = moved.get(link, 0.0) + row.count * size
            busy_s[link] = busy_s.get(link, 0.0) + row.count * size / rate
    return [plot.Load(link, moved[link], busy_s[link] / found.time_s) for link in moved]


def _write(path: str, content: dict[str, Any]) -> None:
    pathlib.Path(path).write_text(json.dumps(content), encoding="utf-8")
