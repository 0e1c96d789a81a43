"""Command line."""

import argparse
import sys
from collections.abc import Sequence

from jaxcomm.simulate.cli import collective, goodput, reshard, step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.simulate",
        description="Times of collectives and of training steps on clusters that are not at hand, with intervals that "
        "are meant to hold 80 % of the measured times.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (collective, reshard, step, goodput):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:  # also those of clusters and programs
        print(f"python -m jaxcomm.simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m jaxcomm.simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
