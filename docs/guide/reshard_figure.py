"""Draws docs/_static/reshard.svg: the pieces of an array that travel from a 2 x 2 mesh to three other devices."""

import pathlib

import matplotlib
from matplotlib import pyplot

from jaxcomm._core import plan

ROWS, SHIFT = 6, 14
HELD = [(r, r + 3, c, c + 4) for r in (0, 3) for c in (0, 4)]
WANTED = [(r, r + 2, 0, 8) for r in (0, 2, 4)]
ARROW = {"arrowstyle": "->", "lw": 0.7}
COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"]


def numbers(boxes, before, after):
    """Boxes of all ranks, in a dimension in front that tells which ranks have one."""
    none = (0,) * 6
    flat = [none] * before + [(0, 1, *box) for box in boxes] + [none] * after
    return [number for box in flat for number in box]


def main():
    matplotlib.rcParams["svg.hashsalt"] = "jaxcomm"  # the same file in every run
    request = plan.reshard_request("node", 7, 7, numbers(HELD, 0, 3), numbers(WANTED, 4, 0))
    figure, axes = pyplot.subplots(figsize=(7.5, 2.6))
    for rank, (top, bottom, left, right) in enumerate(HELD):
        axes.add_patch(pyplot.Rectangle((left, top), right - left, bottom - top, fc=COLOURS[rank], ec="black", lw=1.5))
        axes.text(left + 0.2, top + 1.8, f"device {rank}", color="white", fontsize=8)
    for rank, plan_of_rank in enumerate(plan.build(request, "direct")[4:], 4):
        top = WANTED[rank - 4][0]
        for step in plan_of_rank.steps:
            above, below, first, last = HELD[step.src.rank]
            begin, end = max(top, above), min(top + 2, below)
            piece = ((SHIFT + first, begin), last - first, end - begin)
            axes.add_patch(pyplot.Rectangle(*piece, fc=COLOURS[step.src.rank], ec="white", lw=0.8))
            middle = (begin + end) / 2
            axes.annotate("", (SHIFT + first + 0.3, middle), (last - 0.4, middle), arrowprops=ARROW)
        axes.add_patch(pyplot.Rectangle((SHIFT, top), 8, 2, fc="none", ec="black", lw=1.5))
        axes.text(SHIFT + 8.2, top + 1.2, f"device {(7, 5, 6)[rank - 4]}", fontsize=8)
    axes.set(xlim=(-0.2, SHIFT + 11), ylim=(ROWS + 0.2, -0.2), aspect="equal")
    axes.axis("off")
    folder = pathlib.Path(__file__).parents[1] / "_static"
    figure.savefig(folder / "reshard.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
