"""Command line."""

import argparse
import re
import sys
from collections.abc import Sequence

from jaxcomm.simulate.cli import collective, goodput, predict, step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.simulate",
        description="Times of collectives from plans, with bands that hold 80 % of the measured times. Tables have the "
        "columns source, hardware, interconnect, op, dtype, ranks, ranks_per_node, bytes, note (and time_us where they "
        "are measured). Bytes are per rank, in the convention of nccl-tests.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (collective, step, goodput, predict):
        module.add_command(commands)
    return parser


def _joined(argv: Sequence[str]) -> list[str]:
    """``--mtbf=-5y`` for ``--mtbf -5y``, which argparse takes for two options: the command judges the value."""
    found: list[str] = []
    for word in argv:
        if re.match(r"-\d", word) and found and re.fullmatch("--[a-z-]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        return int(args.run(args))
    except ValueError as error:  # also those of tables, parameters, clusters and programs
        print(f"python -m jaxcomm.simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m jaxcomm.simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
