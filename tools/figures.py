"""Draws the figures of the documentation: python tools/figures.py. Needs matplotlib.

Those of measurements come from benchmarks/results, those of predictions from jaxcomm.simulate.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

from jaxcomm.simulate import cli

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PREDICTED = [
    "--bytes 64KiB..64MiB --ranks 64 --algorithm hierarchical --compare direct --plot {}/interval.png",
    "--bytes 256MiB --ranks 512 --what-if spine.taper=4 leaf.bandwidth=800Gb/s --plot waterfall={}/waterfall.png",
]
SIDES = {"synchronous": "jaxcomm", "start": "jaxcomm, started"}  # measurements of overlap.py beside jax.lax


def load(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["records"]


def speed(ax) -> None:
    """Time of jax.lax divided by that of jaxcomm over size, a line per operation."""
    records = [record for record in load("cpu.json") if record["mode"] == "chain" and record["baseline_time_us"]]
    for op in dict.fromkeys(record["op"] for record in records):
        lines = [(r["size_bytes"], r["baseline_time_us"] / r["time_us"]) for r in records if r["op"] == op]
        if len(lines) > 1:  # barrier has one size
            ax.plot(*zip(*lines, strict=True), marker=".", label=op)
    ax.axhline(1, color="gray", linestyle="--")
    ax.set_xscale("log", base=2)
    ax.set_xticks([1 << 10, 1 << 15, 1 << 20, 1 << 25], ["1 KiB", "32 KiB", "1 MiB", "32 MiB"])
    ax.set(xlabel="bytes per rank", ylabel="times as fast as jax.lax", ylim=(0, None))
    ax.legend(frameon=False)


def overlap(ax) -> None:
    """Tokens per second of training between two hosts, divided by those of jax.lax."""
    records = load("overlap-hosts.json")
    scripts = list(dict.fromkeys(record["script"] for record in records))
    for i, (side, label) in enumerate(SIDES.items()):
        found = {record["script"]: record["times_of_lax"] for record in records if record["side"] == side}
        bars = ax.barh([j + 0.4 * i for j in range(len(scripts))], [found[s] for s in scripts], 0.38, label=label)
        ax.bar_label(bars, fmt="%.2f", padding=3)
    ax.axvline(1, color="gray", linestyle="--")
    ax.set_yticks([j + 0.2 for j in range(len(scripts))], scripts)
    ax.set(xlabel="tokens per second, times those of jax.lax", xlim=(0, 1.6))
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right", ncols=2, bbox_to_anchor=(1, 1))


if __name__ == "__main__":
    for draw, height in ((speed, 3.8), (overlap, 2.4)):
        figure, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
        ax.spines[["top", "right"]].set_visible(False)
        draw(ax)
        figure.savefig(RESULTS / f"{draw.__name__}.png", dpi=150, metadata={"Software": None})
    for options in PREDICTED:
        cli.main(["collective", "all_to_all", "--cluster", "dgx-h100", *options.format(RESULTS).split()])
