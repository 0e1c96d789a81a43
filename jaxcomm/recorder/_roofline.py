"""Measured calls of traces beside what the machine can do, and beside the prediction."""

import collections
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from jaxcomm import _cost_params
from jaxcomm._measure import timing
from jaxcomm.recorder._predict import Shape

_FAR = 2.0  # times of the prediction
_SMALL = 5.0  # a time of so many times the copy limit is for the steps of a call, not for its bytes
_FASTER = 0.9  # another algorithm, as a part of the prediction
_WORTH = 0.01  # of the time of all calls: less is not worth advice
_LIMIT_REPS = 7


@dataclasses.dataclass(frozen=True)
class Row:
    """Calls of one site and shape, those of all processes together.

    Attributes:
      calls: of one process.
      moving_us, waiting_us: medians of the time after and before all ranks had arrived.
      total_s: of all calls of a process, on average.
      waiting_s: the part of it before all ranks had arrived.
      predicted_us: None if the cost model does not predict the op.
      copy_limit_us: time to copy the buffers of all ranks once; None for ops without data and between hosts.
      advice: what would help.
    """

    op: str
    site: str
    algorithm: str
    ranks: int
    size_bytes: int
    calls: int
    moving_us: float
    waiting_us: float
    total_s: float
    waiting_s: float
    predicted_us: float | None
    copy_limit_us: float | None
    advice: tuple[str, ...]


def copy_limit_us(shape: Shape) -> float | None:
    """Measured on this machine, now."""
    if shape.size_bytes == 0 or len(shape.ranks_of_nodes) != 1:
        return None
    with timing.CopyLimit(shape.num_ranks, shape.size_bytes, fresh=False) as limit:
        return statistics.median(limit.measure_us() for _ in range(_LIMIT_REPS))


def report(
    paths: Iterable[pathlib.Path], limit_of: Callable[[Shape], float | None] = copy_limit_us
) -> tuple[list[Row], list[str]]:
    """The rows of traces of one program, the longest first, and notes.

    Raises:
      ValueError: a file is no trace of jaxcomm.recorder.
    """
    calls: dict[tuple[int, int], dict[str, Any]] = {}  # by process and number: each rank of the process has a row
    notes = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            found = [event for event in content["traceEvents"] if "moving_us" in event.get("args", {})]
            calls |= {(event["pid"], event["args"]["number"]): event["args"] for event in found}
            if dropped := content["otherData"]["calls that the ring has dropped"]:
                notes.append(f"{path}: without the first {dropped} calls; JAXCOMM_RECORDER_CALLS keeps more")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a trace of jaxcomm.recorder.trace()") from error
    same: dict[tuple[str, str, Shape], list[tuple[int, dict[str, Any]]]] = collections.defaultdict(list)
    for (process, _), call in calls.items():
        if call["result"] == "done":
            same[call["site"], call["algorithm"], Shape.of(call)].append((process, call))
    rows = {key: _row(*key, of, limit_of) for key, of in same.items()}
    least_us = _WORTH * 1e6 * sum(row.total_s for row in rows.values())
    advised = [
        dataclasses.replace(row, advice=tuple(_advice(row, shape, least_us / row.calls)))
        for (_, _, shape), row in rows.items()
    ]
    return sorted(advised, key=lambda row: -row.total_s), notes


def _row(
    site: str,
    algorithm: str,
    shape: Shape,
    of: list[tuple[int, dict[str, Any]]],
    limit_of: Callable[[Shape], float | None],
) -> Row:
    num_processes = len({process for process, _ in of})
    moving_us, waiting_us = (statistics.median(call[name] for _, call in of) for name in ("moving_us", "waiting_us"))
    return Row(
        op=shape.op,
        site=site,
        algorithm=algorithm,
        ranks=shape.num_ranks,
        size_bytes=shape.size_bytes,
        calls=len(of) // num_processes,
        moving_us=moving_us,
        waiting_us=waiting_us,
        total_s=sum(call["moving_us"] + call["waiting_us"] for _, call in of) / num_processes / 1e6,
        waiting_s=sum(call["waiting_us"] for _, call in of) / num_processes / 1e6,
        predicted_us=of[0][1]["predicted_us"],
        copy_limit_us=limit_of(shape),
        advice=(),
    )


def _advice(row: Row, shape: Shape, least_us: float) -> Iterable[str]:
    """What would save at least this time of a call."""
    moving_us, predicted_us, limit_us = row.moving_us, row.predicted_us, row.copy_limit_us
    if row.waiting_us > max(moving_us, least_us):
        crowd = f": {row.ranks} ranks share {timing.cores()} processors" if row.ranks > timing.cores() else ""
        yield f"ranks wait for each other {row.waiting_us / moving_us:.0f} times as long as data move{crowd}"
    if moving_us < least_us:
        return
    fastest = shape.predicted()
    if fastest and fastest[0] != row.algorithm and fastest[1] * 1e6 < _FASTER * (predicted_us or moving_us):
        yield f"algorithm={fastest[0]!r} is predicted to take {fastest[1] * 1e6:.0f} us"
    if predicted_us is None:
        if limit_us is not None and moving_us > _SMALL * limit_us:
            yield f"{moving_us / limit_us:.0f} times the copy limit"
    else:
        if moving_us > _FAR * predicted_us:
            fit = "" if _cost_params.measured else "; jaxcomm.calibrate() fits predictions to this machine"
            yield f"{moving_us / predicted_us:.1f} times the prediction: other work uses the processors{fit}"
        if limit_us is not None and predicted_us > _SMALL * limit_us:
            yield "steps take longer than bytes: join it with other small calls"
    if shape.starts:
        yield f"{shape.starts} beside computations hides up to {moving_us * row.calls / 1e3:.1f} ms"


def text(rows: list[Row], notes: list[str]) -> str:
    total_s, waiting_s = sum(row.total_s for row in rows), sum(row.waiting_s for row in rows)
    lines = [
        f"{sum(row.calls for row in rows)} calls, {total_s:.3f} s; ranks waited for each other in {waiting_s:.3f} s",
        f"{'op':18} {'ranks':>5} {'bytes':>10} {'calls':>6} {'wait us':>9} {'move us':>9} {'predicted':>9} "
        f"{'copy limit':>10} {'total s':>8}  algorithm, site",
    ]
    for row in rows:
        predicted, limit = (f"{us:.1f}" if us is not None else "-" for us in (row.predicted_us, row.copy_limit_us))
        lines.append(
            f"{row.op:18} {row.ranks or '-':>5} {row.size_bytes:10} {row.calls:6} {row.waiting_us:9.1f} "
            f"{row.moving_us:9.1f} {predicted:>9} {limit:>10} {row.total_s:8.3f}  {row.algorithm}, {row.site}"
        )
        lines += [f"    {advice}" for advice in row.advice]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])
