"""Command line."""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jaxcomm.simulate import calls, judge, predict, store, table, validate
from jaxcomm.simulate.cluster import Cluster


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

    ask = commands.add_parser("predict", help="add predicted_us, low_us and high_us to the rows of a table")
    ask.add_argument("table", metavar="IN.csv")
    ask.add_argument("--out", required=True, metavar="OUT.csv")
    ask.add_argument("--parameters", help="parameters that `fit` wrote (default: the package's)", metavar="FILE")

    call = commands.add_parser("collective", help="time of a jaxcomm collective on a cluster, from its plan")
    call.add_argument("op", metavar="OP", help="public name, such as psum or all_to_all")
    call.add_argument(
        "--bytes", required=True, metavar="SIZES", help="operand of one rank: 64MiB, 1KiB,1MiB, 64KiB..4GiB"
    )
    call.add_argument("--ranks", metavar="N,...", help="numbers of ranks (default: one group of the first level)")
    call.add_argument(
        "--cluster", required=True, metavar="CLUSTER", help=f"TOML file, or one of {', '.join(Cluster.names())}"
    )
    call.add_argument("--algorithm", metavar="NAME", help="default: that of lowest cost in the cost model")
    call.add_argument("--dtype", default="float32", help="element type (default: float32)")
    call.add_argument("--fidelity", default="folded", choices=calls.FIDELITIES, help="default: folded")
    call.add_argument("--json", action="store_true", help="one JSON object for each size and number of ranks")
    return parser


def _sizes(text: str) -> list[int]:
    """Bytes of "64MiB", "1KiB,1MiB" or "64KiB..4GiB" (every power of two in between)."""

    def one(part: str) -> int:
        found = re.fullmatch(r"\s*(\d+)\s*([KMGT]?i?B?)\s*", part)
        scale = {"": 1, "K": 10, "M": 20, "G": 30, "T": 40}
        if not found or (unit := found[2].rstrip("B").rstrip("i")) not in scale:
            raise ValueError(f"--bytes: got {part!r}, expected a size such as 4096, 64KiB or 1GiB")
        return int(found[1]) << scale[unit] if unit else int(found[1])

    sizes = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        size = one(first)
        sizes.append(size)
        while last and size > 0 and (size := 2 * size) <= one(last):
            sizes.append(size)
    return sizes


def _collective(args: argparse.Namespace) -> int:
    cluster = Cluster.load(args.cluster)
    dtype = np.dtype(args.dtype)
    try:
        numbers = [int(part) for part in args.ranks.split(",")] if args.ranks else [cluster.levels[0].ranks]
    except ValueError:
        raise ValueError(f"--ranks: got {args.ranks!r}, expected numbers separated by commas") from None
    for ranks in numbers:
        for size in _sizes(args.bytes):
            count = size // dtype.itemsize
            if args.op in ("all_to_all", "psum_scatter"):  # n equal blocks
                count = -(-count // ranks) * ranks
            x = jax.ShapeDtypeStruct((count,), dtype)
            found = calls.collective(
                args.op, x, ranks, cluster=cluster, algorithm=args.algorithm, fidelity=args.fidelity
            )
            print(json.dumps(dataclasses.asdict(found)) if args.json else found, flush=True)
    return 0


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


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run = {"validate": _validate, "fit": _fit, "predict": _predict, "collective": _collective}[args.command]
    try:
        return run(args)
    except (table.TableError, store.ParametersError, ValueError) as error:
        print(f"python -m jaxcomm.simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m jaxcomm.simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
