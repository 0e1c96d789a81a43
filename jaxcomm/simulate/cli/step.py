"""The command `step`: a prediction, what-ifs, comparisons, timelines and plots."""

import argparse
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax

from jaxcomm.simulate.cli import options
from jaxcomm.simulate.cluster import skew as skews
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.export import perfetto, plots
from jaxcomm.simulate.step import hlo, predict
from jaxcomm.simulate.step.result import Step
from jaxcomm.simulate.step.tasks import StepError


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    step = commands.add_parser("step", help="time of a step on a cluster, from its jaxpr")
    text = "FILE.py:FUNCTION or MODULE:FUNCTION; FUNCTION(mesh) returns the step and a tuple of its arguments"
    step.add_argument("target", metavar="TARGET", nargs="?", help=text)
    text = "axes, outermost first: data=16,model=8; optional with --hlo"
    step.add_argument("--mesh", metavar="AXIS=SIZE,...", help=text)
    step.add_argument("--hlo", metavar="FILE", help="HLO text instead of TARGET: compiled.as_text() of several devices")
    text = "times of kernels from jax.profiler, for --hlo: FILE.trace.json.gz"
    step.add_argument("--profile", metavar="FILE", help=text)
    step.add_argument("--cluster", required=True, metavar="CLUSTER", help=options.cluster_help())
    step.add_argument("--while-trips", type=int, default=1, metavar="N", help="iterations of while loops (default: 1)")
    step.add_argument("--compare", metavar="CLUSTER", nargs="+", default=[], help="other clusters")
    options.add(step)
    step.set_defaults(run=run)


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

    def of_target(cluster: Cluster) -> Step:
        try:
            return predict.step(
                step_fn,
                arguments,
                mesh=mesh,
                cluster=cluster,
                while_trips=args.while_trips,
                skew=skews.parse(args.skew) if args.skew else None,
                seed=args.seed,
                symmetric_buffers=args.symmetric_buffers,
            )
        except StepError as error:
            raise ValueError(f"{args.target}: {error}") from None

    return of_target


def run(args: argparse.Namespace) -> int:
    clusters, drawn = options.clusters(args), options.plots(args)
    made_of = tuple(clusters)
    for name in args.compare:
        clusters[f"cluster {name}"] = Cluster.load(name)
    options.check_plots(drawn, len(clusters))
    predict = _workload(args)
    found: dict[str, Step] = {}
    for label, cluster in clusters.items():
        found[label] = predict(cluster)
        options.print_one(args, label, found[label], found[label].row(), found[""].time_s)
    if args.trace:
        options.write(args.trace, perfetto.of_step(list(found.values())[-1]))
    title = f"step on {' x '.join(f'{name} {size}' for name, size in found[''].mesh.items())} of {clusters[''].name}"
    if "time" in drawn:
        plots.steps(drawn["time"], title, found)
    if "links" in drawn:
        plots.links(drawn["links"], title, {name or "as given": _loads(one) for name, one in found.items()})
    if "waterfall" in drawn:
        options.waterfall(
            drawn["waterfall"], title, {name: one.time_s for name, one in found.items() if name in made_of}
        )
    return 0


def _loads(found: Step) -> list[plots.Load]:
    """Of all collectives of a step together."""
    moved: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    for row in found.collectives:
        for link, (size, rate) in row.simulated.links.items():
            moved[link] = moved.get(link, 0.0) + row.count * size
            busy_s[link] = busy_s.get(link, 0.0) + row.count * size / rate
    return [plots.Load(link, moved[link], busy_s[link] / found.time_s) for link in moved]
