"""Plots of predictions as PNG. `check` imports matplotlib, because nothing else needs it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcomm._measure import size_text
from jaxcomm.simulate.collectives import time_text
from jaxcomm.simulate.step.result import Step


@dataclasses.dataclass(frozen=True)
class Point:
    """One prediction. `series` names the line that it belongs to."""

    series: str
    ranks: int
    bytes: int
    time_s: float
    interval: tuple[float, float] | None


_MOST_SHADED = 2  # lines: more intervals hide each other


def check() -> Any:
    """The class of figures.

    Raises:
      ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install matplotlib)") from None
    return Figure


def _axes(height: float, title: str) -> tuple[Any, Any]:
    figure = check()(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")  # above the names of the bars too
    return figure, axes


def _time_unit(largest_s: float) -> tuple[float, str]:
    return next((s, unit) for s, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if largest_s >= s or unit == "us")


def collectives(path: str, title: str, points: Sequence[Point]) -> None:
    """Time against bytes, with a line for each series and number of ranks; against ranks if there is one size only.

    The interval of up to two lines is shaded.
    """
    from matplotlib.ticker import FuncFormatter

    figure, axes = _axes(5, title)
    by_ranks = len({point.bytes for point in points}) < len({point.ranks for point in points})
    lines: dict[str, list[tuple[int, Point]]] = {}
    for point in points:
        place, other = (point.ranks, size_text.text(point.bytes)) if by_ranks else (point.bytes, f"{point.ranks} ranks")
        lines.setdefault(f"{point.series}, {other}", []).append((place, point))
    for label, members in lines.items():
        places = [place for place, _ in members]
        [line] = axes.plot(places, [point.time_s for _, point in members], marker="o", label=label)
        if len(lines) <= _MOST_SHADED:
            limits = [point.interval or (point.time_s,) * 2 for _, point in members]
            axes.fill_between(places, *zip(*limits, strict=True), alpha=0.1, color=line.get_color())
    every = sorted({place for members in lines.values() for place, _ in members})
    ticks = every[:: -(-len(every) // 8)]
    axes.set(xscale="log", yscale="log", ylabel="predicted time", xlabel="ranks" if by_ranks else "operand")
    axes.set_xticks(ticks, [f"{place:,}" if by_ranks else size_text.text(place) for place in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time_s, _: time_text(time_s)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _bars(axes: Any, names: Sequence[str], largest_s: float) -> tuple[float, str]:
    """Sets up horizontal bars, the first on top. Returns the unit of time."""
    scale, unit = _time_unit(largest_s)
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 1.25 * largest_s / scale))
    axes.set_ylim(len(names) - 0.5, -0.5)
    return scale, unit


def waterfall(path: str, title: str, base_s: float, alone: Mapping[str, float], concurrent_s: float) -> None:
    """The first time, the difference that each change alone makes, and the time with all changes."""
    figure, axes = _axes(1.2 + 0.45 * (len(alone) + 2), title)
    rows = {"as given": (0.0, base_s), **{name: (base_s, time_s) for name, time_s in alone.items()}}
    rows["all changes"] = (0.0, concurrent_s)
    scale, unit = _bars(axes, list(rows), max(end_s for _, end_s in rows.values()))
    for place, (start_s, end_s) in enumerate(rows.values()):
        colour = "tab:gray" if not start_s else "tab:green" if end_s < start_s else "tab:red"
        axes.barh(place, (end_s - start_s) / scale, 0.6, left=start_s / scale, color=colour)
        text = time_text(end_s) + (f" ({round(end_s / base_s - 1, 3) + 0:+.1%})" if place else "")
        axes.annotate(
            text,
            (max(start_s, end_s) / scale, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.axvline(base_s / scale, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel=f"predicted time ({unit})")
    figure.savefig(path, dpi=120, format="png")


def steps(path: str, title: str, found: Mapping[str, Step]) -> None:
    """A bar for each prediction: computation, and communication without computation. The text has the interval."""
    figure, axes = _axes(1.5 + 0.45 * len(found), title)
    steps = list(found.values())
    scale, unit = _bars(axes, [name or "as given" for name in found], 1.6 * max(step.time_s for step in steps))
    rest = [(step.time_s - step.exposed_s) / scale for step in steps]
    exposed = [step.exposed_s / scale for step in steps]
    axes.barh(range(len(steps)), rest, 0.6, label="computation")
    bars = axes.barh(range(len(steps)), exposed, 0.6, left=rest, label="communication without computation")
    texts = ["{} ({} to {})".format(*map(time_text, (step.time_s, *step.interval))) for step in steps]
    axes.bar_label(bars, texts, padding=4, fontsize="small")
    axes.set(xlabel=f"predicted time of a step ({unit}), with its interval")
    figure.legend(loc="outside lower center", fontsize="small", ncols=2, frameon=False)
    figure.savefig(path, dpi=120, format="png")
