"""Options that `collective` and `step` share."""

import argparse
import json
import os
import pathlib
from typing import Any

from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.export import plots as plotting

ALL = "all what-ifs"


def cluster_help() -> str:
    return f"TOML file, or one of {', '.join(Cluster.names())}"


def add(parser: argparse.ArgumentParser) -> None:
    text = "a figure of the cluster, such as leaf.bandwidth=800Gb/s; several form one what-if, separated by commas"
    parser.add_argument("--what-if", metavar="KEY=VALUE", nargs="+", default=[], help=text)
    text = "leaf[3]=0.5 (share left; lost: 0), leaf.planes=1 (lost), rank[7]=1.5 (times as slow), rank[7]=lost"
    parser.add_argument("--fault", metavar="FAULT", nargs="+", default=[], help=text)
    text = "peers access operands and results where XLA has them; otherwise data passes through an arena"
    parser.add_argument("--symmetric-buffers", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object per prediction")
    parser.add_argument("--trace", metavar="OUT.json", help="timeline of the last prediction, for ui.perfetto.dev")
    text = "plots, which need matplotlib: OUT.png of times, waterfall=OUT.png of what-ifs"
    parser.add_argument("--plot", metavar="[KIND=]OUT.png", nargs="+", default=[], help=text)


def changes(text: str) -> dict[str, str]:
    """Values by key of "leaf.bandwidth=100,leaf.latency=2us"."""
    changes = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"--what-if: got {part!r}, expected KEY=VALUE such as leaf.bandwidth=800Gb/s")
        changes[key.strip().removeprefix("level.")] = value.strip()
    return changes


def outputs(args: argparse.Namespace) -> dict[str, str]:
    """Paths of the plots by kind. Checks them and that of --trace before a prediction takes time."""
    found: dict[str, str] = {}
    for text in args.plot:
        path = text.removeprefix("waterfall=")
        kind = "time" if path == text else "waterfall"
        if not path or kind in found or pathlib.Path(path) in map(pathlib.Path, found.values()):
            raise ValueError(f"--plot: got {text!r}, expected OUT.png or waterfall=OUT.png, once each")
        found[kind] = path
    for option, path in [
        *(("--plot", path) for path in found.values()),
        *([("--trace", args.trace)] * bool(args.trace)),
    ]:
        target = pathlib.Path(path)
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise ValueError(f"{option}: {path}: expected a file that can be written")
    if "waterfall" in found and not args.what_if:
        raise ValueError("--plot waterfall: needs --what-if")
    if found:
        plotting.check()
    return found


def clusters(args: argparse.Namespace) -> dict[str, Cluster]:
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
        made[text] = Cluster.load(args.cluster, {**broken, **changes(text)})
    if any(text.startswith("waterfall=") for text in args.plot):
        every: dict[str, str] = {}
        for text in args.what_if:
            if twice := every.keys() & changes(text).keys():
                raise ValueError(f"--plot waterfall: {min(twice)} is in two what-ifs, which cannot hold at once")
            every |= changes(text)
        made[ALL] = Cluster.load(args.cluster, {**broken, **every})
    return made


def waterfall(path: str, title: str, times: dict[str, float]) -> None:
    alone = {label: time_s for label, time_s in times.items() if label not in ("", ALL)}
    plotting.waterfall(path, title, times[""], alone, times[ALL])


def print_one(args: argparse.Namespace, label: str, found: Any, row: dict[str, Any], base: float | None) -> None:
    if args.json:
        print(json.dumps({"what_if": label, **row} if label else row), flush=True)
        return
    if label:
        print(f"--- {label}")
    print(found, flush=True)
    if base and label and found.time_s is not None:
        print(f"compared    {found.time_s / base:.3f} times the first time")


def write(path: str, content: dict[str, Any]) -> None:
    pathlib.Path(path).write_text(json.dumps(content), encoding="utf-8")
