"""Markdown tables of a result file of the benchmark.

python tools/benchmark_table.py out.json                              prints them
python tools/benchmark_table.py out.json --into benchmarks/README.md    writes them between the marks of this file
"""

import argparse
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomm._measure import size_text
from jaxcomm.bench import report
from jaxcomm.bench.records import Record

_TABLE_SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_MODES = ("chain", "call")
_MARKS = ("<!-- benchmark table: begin -->", "<!-- benchmark table: end -->")


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def load(path: str) -> tuple[dict[str, Any], list[Record]]:
    """The context and the records of a result file."""
    document = json.loads(pathlib.Path(path).read_text())
    return document, [Record(**r) for r in document.pop("records")]


def _time_text(us: float) -> str:
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us" if us < 1000 else f"{us / 1e3:.1f} ms"


def _ratio(r: Record) -> str:
    return "none" if r.speedup is None else f"{r.speedup:.1f}x"


def _table(rows: Sequence[Record], sizes: Sequence[int]) -> list[str]:
    out = ["| op | " + " | ".join(size_text.text(s) for s in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for op in _in_order(r.op for r in rows):
        cells = []
        for size in sizes:
            # An op without data has one result, in the first column.
            wanted = (size, 0) if size == sizes[0] else (size,)
            found = [r for r in rows if r.op == op and r.size_bytes in wanted and r.time_us is not None]
            cells.append(f"{_time_text(found[0].time_us or 0)} ({_ratio(found[0])})" if found else "")
        out.append(f"| `{op}` | " + " | ".join(cells) + " |")
    limits = {r.size_bytes: r.limit_us for r in rows if r.limit_us is not None}
    if limits:
        out.append("| copy limit | " + " | ".join(_time_text(limits[s]) if s in limits else "" for s in sizes) + " |")
    return out


def markdown(run: dict[str, Any], rows_of_run: Sequence[Record]) -> str:
    """One table per mode and shape: jaxcomm's time, and the ratio of the baseline's time to it."""
    sizes = sorted({r.size_bytes for r in rows_of_run if r.size_bytes} & set(_TABLE_SIZES))
    sizes = sizes or sorted({r.size_bytes for r in rows_of_run if r.size_bytes})
    p = run["parameters"]
    titles = {
        "chain": f"Chain of {p['chain']} dependent ops inside one `jit`, time per op",
        "call": "One op per `jit` call, host to host",
    }
    out = []
    for of in _in_order((r.processes, r.ranks) for r in rows_of_run):
        for mode in _MODES:
            rows = [r for r in rows_of_run if r.mode == mode and (r.processes, r.ranks) == of]
            if not rows:
                continue
            title = titles[mode] if of[0] == 1 else f"{report.shape(*of)}. {titles[mode]}"
            other = "`jax.lax`" if of[0] == 1 else "gloo"
            out += [f"{title} (in brackets: time of {other} divided by it):", "", *_table(rows, sizes), ""]
    devices = f"{p['ranks']} CPU devices, " if "ranks" in p else ""
    out.append(f"{devices}{p['dtype']}. {report.machine_line(run)}.")
    return "\n".join(out) + "\n"


def update_markdown(path: str, table: str) -> None:
    """Replaces the text between the marks of a Markdown file."""
    begin, end = _MARKS
    text = pathlib.Path(path).read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} must hold the lines {begin} and {end} once each")
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    pathlib.Path(path).write_text(re.sub(pattern, lambda _: f"{begin}\n{table}{end}", text, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="FILE.json", help="of python -m jaxcomm.bench --json")
    parser.add_argument("--into", metavar="FILE.md")
    arguments = parser.parse_args()
    table = markdown(*load(arguments.results))
    if arguments.into:
        update_markdown(arguments.into, table)
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
