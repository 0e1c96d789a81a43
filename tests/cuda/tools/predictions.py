"""Predicted times of collectives on 8 GPUs, beside published figures of other libraries.

    predictions.py [--check]

writes the tables of docs/internals/cuda-bandwidth.md between its two marks, or checks them. Needs no GPU: the times
are those of the cost model (docs/internals/cost-model.md), which include the copies into and out of the arena.
"""

import argparse
import csv
import dataclasses
import functools
import math
import pathlib
import sys

import jax
import numpy as np

import jaxcomm

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "internals" / "cuda-bandwidth.md"
PUBLISHED = pathlib.Path(__file__).with_name("published.csv")
BEGIN, END = "<!-- predictions.py begins -->\n", "<!-- predictions.py ends -->\n"

RANKS = 8
LEAST_OF_WIRE = 0.9  # from LARGE on
MOST_OF_NCCL = 1.2  # below LARGE
LARGE = 64 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    name: str
    wire: float  # NVLink, bytes/s per GPU and direction (data sheet)
    node: float  # of the cost model
    own: float  # memory of the GPU, each byte read and written

    def links(self, explanation: jaxcomm.Explanation) -> list[jaxcomm.Link]:
        rates = {"node": self.node, "self": self.own, "ll": self.node / 2}
        return [
            dataclasses.replace(link, bytes_per_s=rates.get(link.name, link.bytes_per_s)) for link in explanation.links
        ]


# H100: the parameters of the cost model. B200: scaled by the data sheets' bandwidths of NVLink and memory.
MACHINES = (
    Machine("H100", 450e9, 350e9, 1.5e12),
    Machine("B200", 900e9, 350e9 * 900 / 450, 1.5e12 * 8000 / 3350),
)
# Bytes as nccl-tests counts them, and the busiest direction of a GPU's NVLink as a part of these bytes.
OPS = {
    "all_to_all": ("all_to_all", 1, (RANKS - 1) / RANKS),
    "all_gather": ("all_gather", RANKS, (RANKS - 1) / RANKS),
    "reduce_scatter": ("psum_scatter", 1, (RANKS - 1) / RANKS),
    "all_reduce": ("psum", 1, 2 * (RANKS - 1) / RANKS),
}
SIZES = (8, *(1 << power for power in (10, 14, 16, 18, 20, 22, 24, 26, 28, 30)))


@dataclasses.dataclass(frozen=True)
class Prediction:
    time_s: float
    in_place_s: float  # with JAXCOMM_SYMMETRIC_BUFFERS=1: nothing passes through the arena
    protocol: str
    sms: int


def predict(machine: Machine, op: str, size: int) -> Prediction:
    name, parts, _ = OPS[op]
    item = np.int8 if size < 4 * RANKS else np.float32
    x = jax.ShapeDtypeStruct((size // parts // np.dtype(item).itemsize,), item)
    made = []
    for in_place in (False, True):
        on_gpus = functools.partial(jaxcomm.explain, name, x, RANKS, platform="cuda", symmetric_buffers=in_place)
        ours = on_gpus()
        made.append(on_gpus(algorithm=ours.algorithm, links=machine.links(ours), max_sms=ours.sms))
    ours, in_place = made
    return Prediction(ours.predicted_time_s, in_place.predicted_time_s, ours.protocol, ours.sms)


def published() -> dict[tuple[str, str, str, int], float]:
    """The best published time in seconds, by library, machine, op and bytes."""
    best: dict[tuple[str, str, str, int], float] = {}
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            key = (row["library"], row["machine"], row["op"], int(row["bytes"]))
            best[key] = min(best.get(key, math.inf), float(row["time_us"]) * 1e-6)
    return best


def size_text(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def of_wire(machine: Machine, op: str, size: int, time_s: float) -> float:
    return OPS[op][2] * size / time_s / machine.wire


def table(machine: Machine, best: dict[tuple[str, str, str, int], float]) -> str:
    text = f"\n**8 x {machine.name}: predictions, not measurements**\n\n| bytes | {' | '.join(OPS)} |\n"
    text += "|---|" + "---|" * len(OPS) + "\n"
    sizes = {size for _, name, _, size in best if name == machine.name} | set(SIZES)
    for size in sorted(sizes):
        cells = []
        for op in OPS:
            ours = predict(machine, op, size)
            cell = f"{number(ours.time_s * 1e6)} us, {'LL' if ours.protocol != 'steps' else f'{ours.sms} SMs'}"
            for library in ("NCCL", "MSCCL++"):
                theirs = best.get((library, machine.name, op, size))
                if theirs is not None:
                    cell += f"; {library} {number(theirs * 1e6)}"
                    if library == "NCCL" and size < LARGE and ours.time_s > MOST_OF_NCCL * theirs:
                        cell += " **slower**"
            if size >= LARGE:
                shares = [of_wire(machine, op, size, time_s) for time_s in (ours.time_s, ours.in_place_s)]
                cell += f"; {100 * shares[0]:.0f} %, {100 * shares[1]:.0f} %"
            cells.append(cell)
        text += f"| {size_text(size)} | {' | '.join(cells)} |\n"
    return text


def section() -> str:
    best = published()
    return "".join(table(machine, best) for machine in MACHINES) + "\n"


def page(text: str) -> str:
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + section() + text[end:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page differs")
    args = parser.parse_args()
    text = PAGE.read_text()
    made = page(text)
    if args.check:
        return int(text != made)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
