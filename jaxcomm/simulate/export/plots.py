"""Plots of predictions as PNG. `_figure` imports matplotlib, because nothing else needs it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcomm.simulate.step.result import Step


@dataclasses.dataclass(frozen=True)
class Point:
    """One prediction. `series` names the line that it belongs to."""

    series: str
    ranks: int
    bytes: int
    time_s: float
    band: tuple[float, float] | None


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install matplotlib)") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def collectives(path: str, title: str, points: Sequence[Point]) -> None:
    """Time against bytes, with a line for each series and number of ranks; against ranks if there is one size only.

    Raises:
      ValueError: no time was predicted, or matplotlib is missing.
    """
    if not points:
        raise ValueError("--plot: no times; --fidelity bounds has bounds only")
    figure, axes = _figure(8, 5)
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
    axes.set_title(title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")


# More series of bars are too thin to read.
MAX_SERIES = 8


@dataclasses.dataclass(frozen=True)
class Load:
    """Bytes on the busiest link of a name, and the share of the time in which it is busy."""

    link: str
    bytes: float
    share: float


def links(path: str, title: str, found: Mapping[str, Sequence[Load]]) -> None:
    """Two bars for each link: bytes, and share of the time. Several predictions have a colour each.

    Raises:
      ValueError: there are no loads, or matplotlib is missing.
    """
    every = sorted((load for loads in found.values() for load in loads), key=lambda load: -load.share)
    names = list(dict.fromkeys(load.link for load in every))  # the busiest first
    if not names:
        raise ValueError("--plot links: no loads of links; --fidelity bounds and the cost model have none")
    figure, (left, right) = _figure(11, 1.9 + len(names) * (0.25 + 0.22 * len(found)), columns=2)
    scale, unit = _bytes_unit(max(load.bytes for load in every))
    thickness = 0.8 / len(found)
    for number, (series, loads) in enumerate(found.items()):
        places = [names.index(load.link) + thickness * (number - (len(found) - 1) / 2) for load in loads]
        left.barh(places, [load.bytes / scale for load in loads], thickness, label=series)
        bars = right.barh(places, [100 * load.share for load in loads], thickness)
        right.bar_label(bars, fmt="%.3g %%", fontsize="small", padding=3)
    left.set(yticks=range(len(names)), yticklabels=names, xlabel=f"{unit} on the busiest link", title="bytes")
    right.set(
        yticks=[],
        xlim=(0, 120 * every[0].share),
        xlabel="% of the time in which this link is busy",
        title="share of capacity",
    )
    for axes in (left, right):
        axes.set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(title)
    if len(found) > 1:
        figure.legend(loc="outside lower center", fontsize="small", ncols=min(len(found), 2))
    figure.savefig(path, dpi=120, format="png")


def waterfall(path: str, title: str, base_s: float, alone: Mapping[str, float], together_s: float) -> None:
    """The first time, the difference that each change alone makes, and the time with all changes."""
    figure, axes = _figure(10, 1.6 + 0.5 * (len(alone) + 2))
    scale, unit = _time_unit(max(base_s, together_s, *alone.values()))
    rows = {"as given": (0.0, base_s), **{name: (base_s, time_s) for name, time_s in alone.items()}}
    rows["all changes"] = (0.0, together_s)
    for place, (start_s, end_s) in enumerate(rows.values()):
        change = start_s > 0
        colour = "tab:gray" if not change else "tab:green" if end_s < start_s else "tab:red"
        axes.barh(place, (end_s - start_s) / scale, left=start_s / scale, color=colour)
        text = f"{end_s / scale:.4g} {unit}" + (f" ({round(end_s / base_s - 1, 3) + 0:+.1%})" if place else "")
        axes.annotate(
            text,
            (max(start_s, end_s) / scale, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.axvline(base_s / scale, color="black", linewidth=0.8, linestyle=":")
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel=f"predicted time ({unit})", title=title)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 1.3 * max(end_s for _, end_s in rows.values()) / scale))
    figure.savefig(path, dpi=120, format="png")


def _bytes_unit(largest: float) -> tuple[float, str]:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest >= 2**power:
            return float(2**power), unit
    return 1.0, "bytes"


def _time_unit(largest_s: float) -> tuple[float, str]:
    return (1.0, "s") if largest_s >= 1 else (1e-3, "ms") if largest_s >= 1e-3 else (1e-6, "us")


def steps(path: str, title: str, found: Mapping[str, Step]) -> None:
    """A bar for each what-if: computation, and communication without it; the line is the band."""
    figure, axes = _figure(9, 1.9 + 0.6 * len(found))
    names = [name or "as given" for name in found]
    scale, unit = _time_unit(max(step.time_s for step in found.values()))
    exposed = [step.exposed_s / scale for step in found.values()]
    rest = [(step.time_s - step.exposed_s) / scale for step in found.values()]
    axes.barh(names, rest, label="computation")
    axes.barh(names, exposed, left=rest, label="communication without computation")
    for index, step in enumerate(found.values()):
        low, high = step.band
        axes.plot([low / scale, high / scale], [index, index], color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel=f"time of a step ({unit}), line: band", title=title)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    figure.savefig(path, dpi=120, format="png")
