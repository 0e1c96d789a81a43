"""python -m jaxcomm.recorder: analysis of a folder, a look at a running program, reports on traces, and exports."""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator

from jaxcomm.recorder import _html, _pytorch, _report, _roofline, _runs, _serve, _start, _top

_OK, _HANGS, _UNREADABLE = 0, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.recorder", description="What do the collectives do?")
    commands = parser.add_subparsers(dest="command", required=True)
    analyze = commands.add_parser("analyze", help="name the cause of a hang, and the ranks that are behind")
    analyze.add_argument("--no-stacks", action="store_true", help="do not ask the processes for their stacks")
    analyze.add_argument("--html", type=pathlib.Path, metavar="FILE", help="also write a page for a browser")
    top = commands.add_parser("top", help="show what each process does now, also while the program hangs")
    top.add_argument("--once", action="store_true", help="one snapshot, instead of one per interval")
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between snapshots")
    export = commands.add_parser("export", help="write dumps that torch.distributed.flight_recorder reads")
    export.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="one file per rank")
    report = commands.add_parser("report", help="compare the calls of traces with the copy limit and the prediction")
    report.add_argument("traces", nargs="+", type=pathlib.Path, help="of jaxcomm.recorder.trace(), one per process")
    for command, default_s in ((analyze, 10.0), (top, 1.0)):
        command.add_argument(
            "--window",
            type=float,
            default=default_s,
            metavar="SECONDS",
            help=f"calls that have waited for so long hang (default {default_s:g})",
        )
    for command in (analyze, top, report):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (analyze, top, export):
        command.add_argument(
            "folder", nargs="?", type=pathlib.Path, help="of the recorder (default: that of this user)"
        )
    for command in (analyze, top):
        command.add_argument(
            "--url",
            action="append",
            default=[],
            help="where jaxcomm.recorder.serve() listens, one per host, instead of the files of the folder",
        )
        command.add_argument(
            "--token", type=pathlib.Path, metavar="FILE", help="of the job (default: the file token of the folder)"
        )
    for command in (analyze, export):
        command.add_argument("--dumps", action="store_true", help="read the copies of the latest errors")
    return parser


@contextlib.contextmanager
def _files(options: argparse.Namespace) -> Iterator[tuple[pathlib.Path, Callable[[], list[str]]]]:
    """The folder of the files, and a function that brings those of other hosts up to date and returns notes."""
    folder = options.folder or _start.default_folder()
    if not options.url:
        yield folder, list
        return
    token = (options.token or folder / _serve.TOKEN).read_text().strip()
    with tempfile.TemporaryDirectory() as copies:
        path = pathlib.Path(copies)
        yield path, lambda: _serve.fetch(options.url, token, path)


def _analyze(options: argparse.Namespace) -> int:
    with _files(options) as (folder, fetch):
        notes = fetch()
        found, run = _report.find(folder, options.window, options.dumps, not (options.no_stacks or options.url), notes)
    if options.html:
        options.html.write_text(_html.page(found, run))
    print(found.json() if options.json else found)
    return _OK if found.verdict == "ok" else _HANGS


def _top_(options: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt), _files(options) as (folder, fetch):
        for snapshot in _top.watch(folder, fetch, options.interval, options.window):
            _top.show(snapshot, options.json)
            if options.once:
                return _HANGS if snapshot.missing_ranks else _OK
    return _OK


def _export(options: argparse.Namespace) -> int:
    run = _runs.find(options.folder or _start.default_folder(), options.dumps)
    print(f"{_pytorch.export(run, options.out)} ranks written to {options.out}")
    return _OK


def _report_(options: argparse.Namespace) -> int:
    rows, notes = _roofline.report(options.traces)
    as_json = {"rows": [dataclasses.asdict(row) for row in rows], "notes": notes} if options.json else None
    print(json.dumps(as_json, indent=1) if as_json else _roofline.text(rows, notes))
    return _OK


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "analyze": _analyze,
    "top": _top_,
    "export": _export,
    "report": _report_,
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if the program goes on, 1 if it does not, 2 if nothing could be read."""
    options = _parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _UNREADABLE
