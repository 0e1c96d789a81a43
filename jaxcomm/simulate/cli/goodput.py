"""The command `goodput`."""

import argparse
import re
from typing import Any

from jaxcomm.simulate.goodput import goodput

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}


def seconds(name: str, text: str) -> float:
    """Seconds of "90", "15min", "6h" or "5y"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*([a-z]*)\s*", text)
    if not found or (found[2] or "s") not in _UNITS:
        raise ValueError(f"{name}: got {text!r}, expected a number with one of the units {', '.join(_UNITS)}")
    return float(found[1]) * _UNITS[found[2] or "s"]


def add_command(commands: Any) -> None:
    parser = commands.add_parser("goodput", help="share of time that makes progress, with failures and checkpoints")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="devices")
    parser.add_argument("--mtbf", required=True, metavar="TIME", help="between failures of one device, such as 5y")
    parser.add_argument("--checkpoint", required=True, metavar="TIME", help="of one checkpoint, such as 90s")
    parser.add_argument("--restart", required=True, metavar="TIME", help="from detection to the first step: 10min")
    parser.add_argument("--detect", default="0s", metavar="TIME", help="from a failure to its detection (default: 0s)")
    parser.add_argument("--interval", metavar="TIME", help="of work between checkpoints (default: the best)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(
        goodput(
            args.ranks,
            mtbf_s=seconds("--mtbf", args.mtbf),
            checkpoint_s=seconds("--checkpoint", args.checkpoint),
            restart_s=seconds("--restart", args.restart),
            detect_s=seconds("--detect", args.detect),
            interval_s=None if args.interval is None else seconds("--interval", args.interval),
        )
    )
    return 0
