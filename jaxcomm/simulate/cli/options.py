"""Options that `collective` and `step` share."""

import argparse
import json
import pathlib
import re
from typing import Any

from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.export import plots as plotting

ALL = "all what-ifs"


PLOTS = ("time", "links", "waterfall")


def cluster_help() -> str:
    return f"TOML file, or one of {', '.join(Cluster.names())}"


def add(parser: argparse.ArgumentParser) -> None:
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


def changes(text: str) -> dict[str, str]:
    """Values by key of "leaf.bandwidth=100,leaf.latency=2us"."""
    changes = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"--what-if: got {part!r}, expected KEY=VALUE such as leaf.bandwidth=800Gb/s")
        changes[key.strip().removeprefix("level.")] = value.strip()
    return changes


def plots(args: argparse.Namespace) -> dict[str, str]:
    """Paths by kind of plotting."""
    found: dict[str, str] = {}
    for text in args.plot:
        kind, equals, path = text.partition("=")
        kind, path = (kind, path) if equals and kind in PLOTS else ("time", text)
        if not path or kind in found or pathlib.Path(path) in map(pathlib.Path, found.values()):
            raise ValueError(f"--plot: got {text!r}, expected OUT.png, links=OUT.png or waterfall=OUT.png, once each")
        if not pathlib.Path(path).parent.is_dir() or pathlib.Path(path).is_dir():
            raise ValueError(f"--plot: {path}: expected a file in a directory that exists")
        found[kind] = path
    if "waterfall" in found and not args.what_if:
        raise ValueError("--plot waterfall: needs --what-if")
    return found


def check_plots(plots: dict[str, str], predictions: int) -> None:
    if "links" in plots and predictions > plotting.MAX_SERIES:
        raise ValueError(f"--plot links: got {predictions} predictions, expected at most {plotting.MAX_SERIES}")


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
    if "waterfall" in plots(args):
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
