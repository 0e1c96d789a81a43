"""Draws when the processes of an example did what."""

import pathlib
from typing import NamedTuple


class Bar(NamedTuple):
    """What a process did from `begin` to `end`, in seconds of the clock that all processes of a host share."""

    row: str
    begin: float
    end: float
    label: str  # equal labels have equal colours


class Mark(NamedTuple):
    row: str
    time: float
    text: str


def draw(bars: list[Bar], marks: list[Mark], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = list(dict.fromkeys(bar.row for bar in bars))
    labels = list(dict.fromkeys(bar.label for bar in sorted(bars, key=lambda bar: bar.begin)))
    colours = matplotlib.colormaps["tab20"].colors
    zero = min(bar.begin for bar in bars)
    last = max(bar.end for bar in bars) - zero
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(rows) + 0.9), layout="constrained")
    for bar in bars:
        y, begin, width = rows.index(bar.row), bar.begin - zero, bar.end - bar.begin
        colour = colours[labels.index(bar.label) % len(colours)]
        axes.barh(y, width, left=begin, height=0.6, color=colour, edgecolor="white", linewidth=0.4)
        if width > 0.01 * last * len(bar.label):
            axes.text(begin + width / 2, y, bar.label, ha="center", va="center", fontsize=7)
    for mark in marks:
        y = rows.index(mark.row)
        axes.vlines(mark.time - zero, y - 0.4, y + 0.4, color="black")
        axes.text(mark.time - zero, y + 0.05, f" {mark.text}", fontsize=7, va="center")
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set(xlabel="seconds", xlim=(0, last), ylim=(len(rows) - 0.4, -0.6))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
