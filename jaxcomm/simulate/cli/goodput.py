"""The command `goodput`."""

import argparse
import re
from typing import Any

from jaxcomm.simulate.goodput import goodput

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("goodput", help="share of time that makes progress, with failures and checkpoints")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="devices")
    parser.add_argument("--mtbf", required=True, metavar="TIME", help="between failures of one device, such as 5y")
    parser.add_argument("--checkpoint", required=True, metavar="TIME", help="of one checkpoint, such as 90s")
    parser.add_argument("--restart", required=True, metavar="TIME", help="from detection to the first step: 10min")
    parser.add_argument("--detect", metavar="TIME", help="from a failure to its detection (default: 0s)")
    parser.add_argument("--interval", metavar="TIME", help="of work between checkpoints (default: the best)")
    parser.set_defaults(run=run)


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([a-z]+)\s*", text)
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{option}: got {text!r}, expected a number with one of the units {', '.join(_UNITS)}")
    return float(found[1]) * _UNITS[found[2]]


def run(args: argparse.Namespace) -> int:
    names = ("mtbf", "checkpoint", "restart", "detect", "interval")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    times = {f"{name}_s": _seconds(f"--{name}", text) for name, text in given.items()}
    print(goodput(args.ranks, **times))
    return 0
