"""Command line."""

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence

from jaxcomm.simulate import ask, failures, judge, megatron, predict, store, table, validate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.simulate",
        description="Times of collectives from plans, with bands that hold 80 % of the measured times. Tables have the "
        "columns source, hardware, interconnect, op, dtype, ranks, ranks_per_node, bytes, note (and time_us where they "
        "are measured). Bytes are per rank, in the convention of nccl-tests.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser("validate", help="fit parts of a table, predict the rest, print the errors")
    check.add_argument("table", metavar="FILE.csv")
    text = f"one of {', '.join(judge.SPLITS)}, `kept-apart` (rows that the parameters were not fitted to); default: all"
    names = [*judge.SPLITS, "kept-apart"]
    check.add_argument("--split", help=text, nargs="+", choices=names, default=names, metavar="SPLIT")
    check.add_argument("--report", help="where to write the table too (default: errors.md)", default="errors.md")
    check.add_argument(
        "--parameters", help="parameters to judge by kept-apart rows (default: the package's)", metavar="FILE"
    )
    text = "exit with status 1 if a target is missed, except for those of TARGET: a split, or a split and its rows"
    check.add_argument("--strict", help=text, nargs="*", default=None, metavar="TARGET")

    fit = commands.add_parser("fit", help="fit parameters to a table and write them as JSON")
    fit.add_argument("table", metavar="FILE.csv")
    fit.add_argument("--out", help="where to write them (default: parameters.json)", default="parameters.json")
    text = "leave out the splits: quicker, but predictions of other scales, ops and systems get the widest band"
    fit.add_argument("--quick", help=text, action="store_true")

    rows = commands.add_parser("predict", help="add predicted_us, low_us and high_us to the rows of a table")
    rows.add_argument("table", metavar="IN.csv")
    rows.add_argument("--out", required=True, metavar="OUT.csv")
    rows.add_argument("--parameters", help="parameters that `fit` wrote (default: the package's)", metavar="FILE")

    ask.add_commands(commands)
    failures.add_command(commands)
    megatron.add_command(commands)
    return parser


def _parameters(path: str | None) -> store.Fitted:
    return store.load(path) if path else store.shipped()


def _measured(path: str) -> table.Table:
    found = table.read(path).measured()
    if not len(found):
        raise table.TableError(f"{path}: no row has a time")
    return found


def _validate(args: argparse.Namespace) -> int:
    rows = _measured(args.table)
    report = validate.run(rows, tuple(name for name in args.split if name != "kept-apart"))
    if "kept-apart" in args.split:
        more = validate.shipped(rows, _parameters(args.parameters))
        report.lines.extend(more.lines)
        report.coverage.update(more.coverage)
    text = validate.text(report, pathlib.Path(args.table).name)
    print(text, end="")
    pathlib.Path(args.report).write_text(text, encoding="utf-8")
    if args.strict is None:
        return 0
    return int(any(not {name, name.split(",")[0]} & set(args.strict) for name in report.missed()))


def _fit(args: argparse.Namespace) -> int:
    rows = _measured(args.table)
    fitted = store.fit(rows, f"fitted to {pathlib.Path(args.table).name}", with_splits=not args.quick)
    store.save(args.out, fitted)
    for key, system in sorted(fitted.model.systems.fitted.items()):
        print(f"{', '.join(part for part in key if part)}: {system.rows} rows")
        for name, value in system.parameters.items():
            identified = system.identified[name]
            print(f"  {name:16}{value:10.4g}" + ("" if identified >= 0.5 else "  not identified: close to its prior"))
    print(f"written to {args.out}")
    return 0


def _predict(args: argparse.Namespace) -> int:
    queries = table.read(args.table, times=False)
    taken = [name for name in predict.COLUMNS if name in queries.columns]
    if taken:
        raise table.TableError(f"{args.table}:1: column {taken[0]} is there already")
    cells, reasons = predict.rows(queries, _parameters(args.parameters))
    table.write(args.out, queries, predict.COLUMNS, cells)
    for index, reason in sorted(reasons.items()):
        print(f"{args.table}:{queries.rows[index].line}: declined: {reason}", file=sys.stderr)
    return 0


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
    run = {
        "validate": _validate,
        "fit": _fit,
        "predict": _predict,
        "collective": ask.collective,
        "step": ask.step,
        "goodput": failures.command,
        "validate-steps": megatron.command,
    }
    try:
        return run[args.command](args)
    except (table.TableError, store.ParametersError, ValueError) as error:
        print(f"python -m jaxcomm.simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m jaxcomm.simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
