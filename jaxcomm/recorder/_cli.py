"""python -m jaxcomm.recorder: analysis of a folder, and exports of it."""

import argparse
import pathlib
import sys

from jaxcomm.recorder import _pytorch, _report, _runs, _start

_OK, _HANGS, _UNREADABLE = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if the program goes on, 1 if it does not, 2 if nothing could be read."""
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.recorder", description="Why does a program not go on?")
    commands = parser.add_subparsers(dest="command", required=True)
    analyze = commands.add_parser("analyze", help="name the cause, and the ranks that are behind")
    analyze.add_argument(
        "--window", type=float, default=10.0, metavar="SECONDS", help="calls that have waited for so long hang"
    )
    analyze.add_argument("--json", action="store_true", help="print JSON")
    analyze.add_argument("--no-stacks", action="store_true", help="do not ask the processes for their stacks")
    export = commands.add_parser("export", help="write dumps that torch.distributed.flight_recorder reads")
    export.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="one file per rank")
    for command in (analyze, export):
        command.add_argument(
            "folder", nargs="?", type=pathlib.Path, help="of the recorder (default: that of this user)"
        )
        command.add_argument("--dumps", action="store_true", help="read the copies of the latest errors")
    options = parser.parse_args(arguments)
    folder = options.folder or _start.default_folder()
    try:
        if options.command == "export":
            run = _runs.find(folder, options.dumps)
            print(f"{_pytorch.export(run, options.out)} ranks written to {options.out}")
            return _OK
        report = _report.analyze(folder, window_s=options.window, dumps=options.dumps, stacks=not options.no_stacks)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return _UNREADABLE
    print(report.json() if options.json else report)
    return _OK if report.verdict == "ok" else _HANGS
