"""The analysis of a folder as one HTML page without outside files."""

import html
from collections.abc import Iterable

from jaxcomm.recorder import _file, _report, _runs, _verdict

_ROWS, _CALLS = 64, 200  # shown of processes, and of the calls of each
_ROW, _LABEL, WIDTH = 26, 230, 1130  # pixels
_BEFORE = 0.25  # time shown before the first open call, as a part of the time since
_STYLE = """
:root { color-scheme: light dark; --ok: #2a9d5c; --bad: #d1495b; --wait: #e9a23b; --move: #3b7dd8 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 span { color: #fff; padding: 0 .4em; border-radius: .3em }
.cause { border-left: 4px solid; padding: 0 1rem; margin: 1rem 0 }
.cause p { margin: .2rem 0 }
th, td { text-align: left; padding: .2rem .8rem .2rem 0 }
pre { overflow-x: auto; font-size: 12px }
svg { max-width: 100%; height: auto; font-size: 12px; fill: currentColor }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
"""
_MOVE, _WAIT, _BAD = "--move", "--wait", "--bad"
_KEY = ((_MOVE, "data move"), (_WAIT, "waits for ranks"), (_BAD, "has not ended"))


def page(report: _report.Report, run: _runs.Run) -> str:
    """The page, as text."""
    badge = f'<span style="background: {_color(report.verdict)}">{_text(report.verdict)}</span>'
    parts = [f"<h1>{badge} {len(report.processes)} of {report.num_processes} processes</h1>"]
    parts += map(_cause, report.findings)
    if timeline := _timeline(report, run):
        key = "".join(f'<span style="background: var({color})"></span>{what}' for color, what in _KEY)
        parts += ["<h2>Latest calls</h2>", timeline, f'<p class="key">{key}</p>']
    for process, stack in report.stacks.items():
        summary = f"<summary>Python stacks of process {process}</summary>"
        parts.append(f"<details open>{summary}<pre>{_text(stack)}</pre></details>")
    if report.stragglers:
        rows = [(str(s.process), s.site, f"{s.last} of {s.calls}", f"{s.waiting_s:.3f}") for s in report.stragglers]
        rows = [("process", "call site", "last in", "others waited (s)"), *rows]
        lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        parts += ["<h2>Last to arrive</h2><table>", *lines, "</table>"]
    if report.links:
        parts += ["<h2>Links</h2><ul>", *(f"<li>{_text(link)}</li>" for link in report.links[:_ROWS]), "</ul>"]
    if report.notes:
        parts += ["<h2>Notes</h2><ul>", *(f"<li>{_text(note)}</li>" for note in report.notes), "</ul>"]
    head = f'<meta charset="utf-8"><title>jaxcomm: {_text(report.verdict)}</title><style>{_STYLE}</style>'
    return "\n".join([f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>', *parts, "</body></html>", ""])


def _text(value: object) -> str:
    return html.escape(str(value))


def _color(verdict: str) -> str:
    return "var(--ok)" if verdict == _verdict.Verdict.OK.value else "var(--bad)"


def _cause(finding: _verdict.Finding) -> str:
    verdict, lines = finding.verdict.value, list(finding.lines)
    if finding.behind:
        behind, waiting = (_file.ranges(sorted(ranks)) for ranks in (finding.behind, finding.waiting))
        lines.insert(0, f"behind: ranks {behind}; waiting: {f'ranks {waiting}' if waiting else 'none'}")
    text = "".join(f"<p>{_text(line)}</p>" for line in lines)
    return f'<div class="cause" style="border-color: {_color(verdict)}"><b>{_text(verdict)}</b>{text}</div>'


def _timeline(report: _report.Report, run: _runs.Run) -> str:
    """A row per process: those of the causes first, then those that wait. "" without calls."""
    opened = {p: [call for call in ring.calls if call.is_open] for p, ring in run.rings.items()}
    causes = {process for finding in report.findings for process in finding.processes}
    order = sorted(run.rings, key=lambda p: (p not in causes, not opened[p], p))[:_ROWS]
    calls = {p: run.rings[p].calls[-_CALLS:] for p in order}
    if not any(calls.values()):
        return ""
    hangs = any(opened[p] for p in order)
    begin = min(call.arrived_ns + run.offset_ns[p] for p in order for call in (opened if hangs else calls)[p])
    ends = [call.ended_ns + run.offset_ns[p] for p in order for call in calls[p]]
    end = max(run.rings[p].now_ns() + run.offset_ns[p] for p in order) if hangs else max(ends)
    begin -= int(_BEFORE * (end - begin))
    shapes = []
    for number, process in enumerate(order):
        y, ring = number * _ROW, run.rings[process]
        ranks = sorted({rank for call in calls[process] for rank in call.group.ranks_of(process)})
        label = f"process {process} (ranks {_file.ranges(ranks)}), {ring.state}"
        shapes.append(f'<text x="0" y="{y + 17}">{_text(label)}</text>')
        for call in calls[process]:
            title = f"<title>{_text(call)}, {_text(call.phase)}</title>"
            for span in _spans(call, end - run.offset_ns[process]):
                first, last = (max(at + run.offset_ns[process], begin) - begin for at in span[:2])
                if last > 0:
                    x, width = (at * (WIDTH - _LABEL) / max(end - begin, 1) for at in (first, last - first))
                    place = f'x="{_LABEL + x:.1f}" y="{y + 4}" width="{max(width, 1):.1f}" height="{_ROW - 8}"'
                    shapes.append(f'<rect {place} fill="var({span[2]})">{title}</rect>')
    y = len(order) * _ROW + 14
    shapes.append(f'<text x="{_LABEL}" y="{y}">{(end - begin) / 1e9:.3g} s before</text>')
    shapes.append(f'<text x="{WIDTH}" y="{y}" text-anchor="end">{"now" if hangs else "last end"}</text>')
    more = f"<p>{len(run.rings) - len(order)} more processes</p>" if len(run.rings) > len(order) else ""
    return f'<svg viewBox="0 0 {WIDTH} {y + 6}" width="{WIDTH}">{"".join(shapes)}</svg>{more}'


def _spans(call: _file.Call, now_ns: int) -> Iterable[tuple[int, int, str]]:
    """Begin, end and color of the parts of a call."""
    moves_ns = max(call.started_ns, call.running_ns) or call.ended_ns
    if call.is_open:
        yield call.arrived_ns, now_ns, _BAD
    else:
        yield call.arrived_ns, moves_ns, _WAIT
        yield moves_ns, call.ended_ns, _MOVE
