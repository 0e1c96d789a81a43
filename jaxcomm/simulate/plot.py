"""Plots of predictions as PNG. matplotlib is imported by the functions, because only they need it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcomm.simulate.steps import Step


@dataclasses.dataclass(frozen=True)
class Point:
    """One prediction. `series` names the line that it belongs to."""

    series: str
    ranks: int
    bytes: int
    time_s: float
    band: tuple[float, float] | None


def _figure(width: float, height: float) -> tuple[Any, Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install matplotlib)") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return pyplot, figure, axes


def collectives(path: str, op: str, points: Sequence[Point]) -> None:
    """Time against bytes, with a line for each series and number of ranks; against ranks if there is one size only.

    Raises:
      ValueError: no time was predicted, or matplotlib is missing.
    """
    if not points:
        raise ValueError("--plot: no times; --fidelity bounds has bounds only")
    pyplot, figure, axes = _figure(8, 5)
    by_ranks = len({point.bytes for point in points}) < len({point.ranks for point in points})
    lines: dict[str, list[tuple[int, Point]]] = {}
    for point in points:
        place, other = (point.ranks, point.bytes) if by_ranks else (point.bytes, point.ranks)
        label = f"{point.series}, {other} {'bytes' if by_ranks else 'ranks'}"
        lines.setdefault(label, []).append((place, point))
    for label, members in lines.items():
        places = [place for place, _ in members]
        [line] = axes.plot(places, [point.time_s * 1e6 for _, point in members], marker="o", label=label)
        lows = [(point.band or (point.time_s,) * 2)[0] * 1e6 for _, point in members]
        highs = [(point.band or (point.time_s,) * 2)[1] * 1e6 for _, point in members]
        axes.fill_between(places, lows, highs, alpha=0.1, color=line.get_color())
    axes.set(xscale="log", yscale="log", ylabel="time (us), shaded: band", xlabel="ranks" if by_ranks else "bytes")
    axes.set_title(op)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def steps(path: str, found: Mapping[str, Step]) -> None:
    """A bar for each what-if: computation, and communication without it; the line is the band."""
    pyplot, figure, axes = _figure(9, 1.5 + 0.6 * len(found))
    names = [name or "as given" for name in found]
    exposed = [step.exposed_s * 1e3 for step in found.values()]
    rest = [(step.time_s - step.exposed_s) * 1e3 for step in found.values()]
    axes.barh(names, rest, label="computation")
    axes.barh(names, exposed, left=rest, label="communication without computation")
    for index, step in enumerate(found.values()):
        low, high = step.band
        axes.plot([low * 1e3, high * 1e3], [index, index], color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="time of a step (ms), line: band")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
