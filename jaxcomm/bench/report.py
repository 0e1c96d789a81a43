"""Prints results: lines in the columns of nccl-tests."""

from collections.abc import Iterable
from typing import Any

from jaxcomm.bench.records import Record

_COLUMNS = (
    # title, unit, width
    ("size", "(B)", 10),
    ("count", "(elements)", 10),
    ("type", "", 9),
    ("op", "", 12),
    ("mode", "", 5),
    ("algorithm", "", 22),
    ("time", "(us)", 10),
    ("algbw", "(GB/s)", 7),
    ("busbw", "(GB/s)", 7),
    ("#wrong", "", 6),
    ("p99", "(us)", 10),
    ("beside", "", 15),
    ("other", "(us)", 10),
    ("other p99", "(us)", 10),
    ("other/ours", "", 10),
    ("ours/limit", "", 10),
    ("reps", "", 5),
)
_LEFT = ("type", "op", "mode", "algorithm", "beside")


def _row(cells: Iterable[str]) -> str:
    padded = (
        f"{cell:<{width}}" if title in _LEFT else f"{cell:>{width}}"
        for cell, (title, _, width) in zip(cells, _COLUMNS, strict=True)
    )
    return " ".join(padded).rstrip()


def _number(value: float | None, nothing: str = "-") -> str:
    return nothing if value is None else f"{value:.2f}"


def machine_line(run: dict[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    commit = "no commit known" if run["commit"] is None else "commit " + run["commit"][:12]
    if run["dirty"]:
        commit += " with changes"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; Python {versions['python']}, "
        f"jax {versions['jax']}, jaxlib {versions['jaxlib']}, jaxcomm {versions['jaxcomm']}, {commit}"
    )


def shape(processes: int, ranks: int) -> str:
    devices = ranks // processes
    return f"{processes} processes x {devices} device{'s' if devices > 1 else ''}"


def header(run: dict[str, Any], ranks: int, processes: int) -> str:
    p = run["parameters"]
    chain = f"chain: {p['chain']} dependent ops inside one jit, time per op" + (", isolated" if p["isolate"] else "")
    modes = f"call: one op per jit call, host to host; {chain}"
    lines = [f"{run['command']}   ({run['started']})", machine_line(run)]
    if processes == 1:
        lines += [
            f"{ranks} CPU devices as {p['axes']}; {modes}",
            "size: as in nccl-tests, per device. time, other: medians; other/ours above 1: jaxcomm is faster",
            f"limit: {run['machine']['cores']} threads copy {ranks} buffers of that size (call: into fresh memory)",
        ]
    else:
        lines += [
            f"{shape(processes, ranks)}; {modes}",
            "size: as in nccl-tests, per device. time, other: medians over repetitions of the slowest process",
        ]
    titles = _row(title for title, _, _ in _COLUMNS), _row(unit for _, unit, _ in _COLUMNS)
    return "\n".join("# " + line for line in lines) + "\n" + "\n".join("# " + title for title in titles)


def line(r: Record) -> str:
    missing = "-" if r.time_us is None else "none"
    cells = (
        str(r.size_bytes),
        str(r.count),
        r.dtype,
        r.op,
        r.mode,
        r.algorithm,
        _number(r.time_us),
        _number(r.algbw_gb_per_s),
        _number(r.busbw_gb_per_s),
        str(r.wrong),
        _number(r.p99_us),
        r.baseline or "",
        _number(r.baseline_time_us, missing),
        _number(r.baseline_p99_us, missing),
        _number(r.speedup, missing),
        _number(r.over_limit),
        str(r.reps),
    )
    note = f"  # {r.baseline}: {r.baseline_wrong} wrong" if r.baseline_wrong else ""
    return "  " + _row(cells) + note
