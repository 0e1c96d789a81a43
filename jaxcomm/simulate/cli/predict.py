"""The command `predict`: the rows of a table, with predicted times."""

import argparse
import sys
from typing import Any

from jaxcomm.simulate.nccl import parameters, predict, table


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    rows = commands.add_parser("predict", help="add predicted_us, low_us and high_us to the rows of a table")
    rows.add_argument("table", metavar="IN.csv")
    rows.add_argument("--out", required=True, metavar="OUT.csv")
    text = "parameters that `python -m tools.simulator fit` wrote (default: the package's)"
    rows.add_argument("--parameters", help=text, metavar="FILE")
    rows.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = table.read(args.table)
    taken = [name for name in predict.COLUMNS if name in given.columns]
    if taken:
        raise table.TableError(f"{args.table}:1: column {taken[0]} is there already")
    fitted = parameters.load(args.parameters) if args.parameters else parameters.shipped()
    cells, reasons = predict.of_rows(given, fitted)
    table.write(args.out, given, predict.COLUMNS, cells)
    for index, reason in sorted(reasons.items()):
        print(f"{args.table}:{given.rows[index].line}: declined: {reason}", file=sys.stderr)
    return 0
