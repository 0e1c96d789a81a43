"""Compares times of plans in the engine with those that LogGOPSim gives for their GOAL schedules.

python -m tools.simulator.compare_loggopsim FOLDER

FOLDER holds the programs txt2bin and LogGOPSim. Both simulators get the same L, o, g and G. Every rank is a node of its
own. The engine has one overhead for each message, before its bytes: the gap g. LogGOPSim divides it between both ends,
so o is half of g.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np

from jaxcomm.simulate import Cluster, collective
from jaxcomm.simulate.cluster.levels import Level
from tools.simulator import goal

# L, o, g and G in picoseconds: 5 us, 0.5 us, 1 us, and 20 ps per byte (50 GB/s). LogGOPSim takes integers.
LATENCY, OVERHEAD, GAP, GAP_PER_BYTE = 5_000_000, 500_000, 1_000_000, 20
_EAGER = 2**31 - 1  # bytes up to which a sender does not wait for its receiver
PLANS = (
    ("psum", "ring"),
    ("psum", "recursive_doubling"),
    ("psum", "rabenseifner"),
    ("all_gather", "ring"),
    ("all_gather", "recursive_doubling"),
    ("all_to_all", "pairwise"),
    ("all_to_all", "direct"),
)
SIZES = (1 << 10, 64 << 10, 8 << 20)


def cluster(ranks: int) -> Cluster:
    """Nodes of one rank on a network without shared links. Starts and copies take no time."""
    node = Level("node", "switch", 1)
    net = Level("net", "fat_tree", ranks, 1e12 / GAP_PER_BYTE, latency_s=LATENCY * 1e-12, overhead_s=GAP * 1e-12)
    return Cluster("LogGP", "H100", (node, net))


def loggopsim_s(folder: pathlib.Path, schedule: goal.Schedule) -> float:
    """The time at which the last rank ends."""
    with tempfile.TemporaryDirectory() as place:
        text, binary = pathlib.Path(place) / "plan.goal", pathlib.Path(place) / "plan.bin"
        text.write_text(goal.text(schedule), encoding="utf-8")
        subprocess.run(
            [str(folder / "txt2bin"), "-i", str(text), "-o", str(binary)], check=True, stdout=subprocess.PIPE
        )
        figures = [f"-L{LATENCY}", f"-o{OVERHEAD}", f"-g{GAP}", f"-G{GAP_PER_BYTE}", f"-S{_EAGER}"]
        command = [str(folder / "LogGOPSim"), "-f", str(binary), *figures]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    ends = [int(end) for end in re.findall(r"^Host \d+: (\d+)", printed, re.MULTILINE)]
    if len(ends) != len(schedule):
        raise ValueError(f"LogGOPSim: expected the times of {len(schedule)} hosts, got {printed!r}")
    return max(ends) * 1e-12


def table(folder: pathlib.Path, ranks: int) -> str:
    """The times of all plans as Markdown."""
    lines = ["| plan | bytes | engine, us | LogGOPSim, us | ratio |", "|---|--:|--:|--:|--:|"]
    made = cluster(ranks)
    for op, algorithm in PLANS:
        for size in SIZES:
            x = jax.ShapeDtypeStruct((size // 4,), np.float32)
            engine_s = collective(op, x, ranks, cluster=made, algorithm=algorithm, symmetric_buffers=True).time_s
            other_s = loggopsim_s(folder, goal.of(op, x, ranks, cluster=made, algorithm=algorithm))
            assert engine_s is not None
            times = f"{1e6 * engine_s:.2f} | {1e6 * other_s:.2f} | {other_s / engine_s:.3f}"
            lines.append(f"| `{op}` by `{algorithm}` | {size} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares times of plans with those of LogGOPSim.")
    parser.add_argument("folder", type=pathlib.Path, help="of txt2bin and LogGOPSim")
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    print(table(args.folder.resolve(), args.ranks), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
