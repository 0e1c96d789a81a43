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
    text = "axes, outermost first: ranks along the last one are neighbours; data=16,model=8; optional with --hlo"
    step.add_argument("--mesh", metavar="AXIS=SIZE,...", help=text)
    step.add_argument("--hlo", metavar="FILE", help="HLO text instead of TARGET: compiled.as_text() of several devices")
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


def _workload(args: argparse.Namespace) -> Callable[[Cluster, dict[str, int] | None], Step]:
    """The prediction of the given step for a cluster and a mesh."""
    if (args.target is None) == (args.hlo is None):
        raise ValueError(f"step: expected one of TARGET and --hlo, got {'none' if args.hlo is None else 'both'}")
    if args.hlo and args.symmetric_buffers:
        raise ValueError("step: --symmetric-buffers needs a TARGET")
    if args.hlo:
        text = pathlib.Path(args.hlo).read_text(encoding="utf-8", errors="replace")
        return lambda cluster, mesh: hlo.of_text(
            text, cluster=cluster, mesh=mesh, while_trips=args.while_trips, file=args.hlo
        )
    if not args.mesh:
        raise ValueError("step: --mesh is missing, such as --mesh data=16,model=8")
    target = _target(args.target)

    def of_target(cluster: Cluster, mesh: dict[str, int] | None) -> Step:
        assert mesh
        try:
            made = target(jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh)))
        except KeyError as error:
            if not error.args or not isinstance(error.args[0], str) or error.args[0] in mesh:
                raise
            raise ValueError(f"step: {args.target}: --mesh {args.mesh} has no axis {error.args[0]!r}") from error
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
            raise ValueError(
                f"step: {args.target} must return the step and a tuple of its arguments, got {made!r:.200}"
            )
        try:
            return predict.step(
                *made,
                mesh=mesh,
                cluster=cluster,
                while_trips=args.while_trips,
                symmetric_buffers=args.symmetric_buffers,
            )
        except StepError as error:
            raise ValueError(f"{args.target}: {error}") from None

    return of_target


def run(args: argparse.Namespace) -> int:
    clusters, drawn = options.clusters(args), options.outputs(args)
    made_of = tuple(clusters)
    for name in args.compare:
        clusters[f"cluster {name}"] = Cluster.load(name)
    mesh = _mesh(args.mesh) if args.mesh else None
    workload = _workload(args)
    found: dict[str, Step] = {}
    for label, cluster in clusters.items():
        found[label] = workload(cluster, mesh)
        options.print_one(args, label, found[label], found[label].row(), found[""].time_s)
    if args.trace:
        options.write(args.trace, perfetto.of_step(list(found.values())[-1]))
    title = f"step on {' x '.join(f'{name} {size}' for name, size in found[''].mesh.items())} of {clusters[''].name}"
    if "time" in drawn:
        plots.steps(drawn["time"], title, found)
    if "waterfall" in drawn:
        options.waterfall(
            drawn["waterfall"], title, {name: one.time_s for name, one in found.items() if name in made_of}
        )
    return 0
