"""Options that `collective` and `step` share."""

import argparse
import json
import os
import pathlib
from typing import Any

from jaxcomm.simulate.cluster.model import Cluster


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


def changes(text: str) -> dict[str, str]:
    """Values by key of "leaf.bandwidth=100,leaf.latency=2us"."""
    changes = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"--what-if: got {part!r}, expected KEY=VALUE such as leaf.bandwidth=800Gb/s")
        changes[key.strip().removeprefix("level.")] = value.strip()
    return changes


def check_trace(args: argparse.Namespace) -> None:
    """Checks the path of --trace before a prediction takes time."""
    if args.trace:
        target = pathlib.Path(args.trace)
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise ValueError(f"--trace: {args.trace}: expected a file that can be written")


def clusters(args: argparse.Namespace) -> dict[str, Cluster]:
    """The cluster, and one for each what-if, by the text of the change."""
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
    return made


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
