"""python -m tools.simulator: fits the parameters of predictions, and predicts rows and steps that were held out."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from jaxcomm.simulate.cluster.model import Cluster
from tools.simulator import errors, holdouts, measured, megatron, parameters, predict, table_file
from tools.simulator.table import Table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.simulator")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    fit = commands.add_parser("fit", help="fit parameters to a table and write them as JSON")
    fit.add_argument("table", metavar="FILE.csv")
    fit.add_argument("--out", help="where to write them (default: parameters.json)", default="parameters.json")
    fit.add_argument("--package", help="write the part that jaxcomm.simulate reads to this file too", metavar="FILE")
    text = "leave out the hold-outs: quicker, but predictions of other scales, ops and systems get the widest interval"
    fit.add_argument("--quick", help=text, action="store_true")
    fit.set_defaults(run=_fit)

    rows = commands.add_parser("predict", help="add predicted_us, low_us and high_us to the rows of a table")
    rows.add_argument("table", metavar="IN.csv")
    rows.add_argument("--out", required=True, metavar="OUT.csv")
    rows.add_argument(
        "--parameters", help="parameters that `fit` wrote (default: those of tools/simulator)", metavar="FILE"
    )
    rows.set_defaults(run=_predict)

    check = commands.add_parser("validate", help="fit parts of a table, predict the rest, print the errors")
    check.add_argument("table", metavar="FILE.csv")
    names = [*holdouts.HOLD_OUTS, "new-rows"]
    text = f"{', '.join(names)} (rows that the parameters were not fitted to); default: all"
    check.add_argument("--hold-out", help=text, nargs="+", choices=names, default=names, metavar="NAME")
    check.add_argument("--report", help="where to write the table too (default: errors.md)", default="errors.md")
    check.add_argument(
        "--parameters", help="parameters for new-rows (default: those of tools/simulator)", metavar="FILE"
    )
    text = (
        "exit with status 1 if a target is missed, except for those of TARGET: a hold-out, or a hold-out and its rows"
    )
    check.add_argument("--strict", help=text, nargs="*", default=None, metavar="TARGET")
    check.set_defaults(run=_validate)

    steps = commands.add_parser("validate-steps", help="predict published training steps, print the errors")
    steps.add_argument("--cluster", default="dgx-a100", help="TOML file or name (default: dgx-a100)")
    steps.add_argument("--report", help="where to write the table too", metavar="FILE.md")
    steps.add_argument("--strict", help="exit with status 1 if the target is missed", action="store_true")
    steps.set_defaults(run=_validate_steps)
    return parser


def _measured(path: str) -> Table:
    found = measured.read(path)
    if not len(found):
        raise table_file.TableError(f"{path}: no row has a time")
    return found


def _fit(args: argparse.Namespace) -> int:
    rows = _measured(args.table)
    fitted = parameters.fitted_to(rows, f"fitted to {pathlib.Path(args.table).name}", with_hold_outs=not args.quick)
    data = parameters.plain(fitted)
    parameters.save(args.out, data)
    if args.package:
        parameters.save(args.package, parameters.of_package(data))
    for key, system in sorted(fitted.model.systems.fitted.items()):
        print(f"{', '.join(part for part in key if part)}: {system.rows} rows")
        for name, value in system.parameters.items():
            identified = system.identified[name]
            print(f"  {name:16}{value:10.4g}" + ("" if identified >= 0.5 else "  not identified: close to its prior"))
    print(f"written to {args.out}")
    return 0


def _predict(args: argparse.Namespace) -> int:
    given = table_file.read(args.table)
    if taken := [name for name in predict.COLUMNS if name in given.columns]:
        raise table_file.TableError(f"{args.table}:1: column {taken[0]} is there already")
    fitted = parameters.load(args.parameters) if args.parameters else parameters.of_measurements()
    cells, reasons = predict.of_rows(given, fitted)
    table_file.write(args.out, given, predict.COLUMNS, cells)
    for index, reason in sorted(reasons.items()):
        print(f"{args.table}:{given.rows[index].line}: declined: {reason}", file=sys.stderr)
    return 0


def _validate(args: argparse.Namespace) -> int:
    rows = _measured(args.table)
    report = errors.run(rows, tuple(name for name in args.hold_out if name != "new-rows"))
    if "new-rows" in args.hold_out:
        fitted = parameters.load(args.parameters) if args.parameters else parameters.of_measurements()
        more = errors.new_rows(rows, fitted)
        report.lines.extend(more.lines)
        report.coverage.update(more.coverage)
    text = errors.text(report, pathlib.Path(args.table).name)
    print(text, end="")
    pathlib.Path(args.report).write_text(text, encoding="utf-8")
    if args.strict is None:
        return 0
    return int(any(not {name, name.split(",")[0]} & set(args.strict) for name in report.missed()))


def _validate_steps(args: argparse.Namespace) -> int:
    cluster = Cluster.load(args.cluster)
    text, met = megatron.table([megatron.predict(run, cluster) for run in megatron.runs()])
    print(text, end="")
    if args.report:
        pathlib.Path(args.report).write_text(text, encoding="utf-8")
    return int(args.strict and not met)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"python -m tools.simulator: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m tools.simulator: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
