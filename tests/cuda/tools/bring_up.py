"""Bring-up of several GPUs: one command per rung, each with a time limit and a record.

    bring_up.py list                       # the rungs in order, with their commands
    bring_up.py one-process out            # writes out/one-process.json and out/one-process.log
    bring_up.py cliques out --platform cpu # rehearses a rung on 8 CPU devices

A rung needs the installed jaxcomm and passes or fails alone; climb them in order, and stop at the first that fails. The
rungs of several nodes run under the launcher of the cluster, one process per GPU:

    srun -N 2 --ntasks-per-node=8 python tests/cuda/tools/bring_up.py nodes out
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys

from on_gpu import COMMAND_BUFFERS, GPU, Machine
from runner import Part, Runner

from jaxcomm._processes import launchers

LIMIT_S = 180
SELFTEST = ("-m", "jaxcomm.selftest")
SELFTEST_S = 150
CLIQUES = (str(GPU / "cliques.py"),)
PROCESSES = ("-m", "jaxcomm.run", "-n", "8", "--grace", "2")


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of the bring-up.

    Attributes:
      what: what it shows.
      program: arguments of Python.
      processes: whether this command starts eight processes; else the program runs in this one's place.
      environment: variables that it adds.
    """

    what: str
    program: tuple[str, ...]
    processes: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def command(self) -> tuple[str, ...]:
        python = (sys.executable, *(PROCESSES if self.processes else ()))
        return (*python, *self.program)


GRAPHS_OFF = {"XLA_FLAGS": COMMAND_BUFFERS["off"]}
GRAPHS_ON = {"XLA_FLAGS": COMMAND_BUFFERS["on"]}
WINDOWS = {"JAXCOMM_SYMMETRIC_BUFFERS": "1"}
RUNGS = {
    "one-process": Rung("one process with all GPUs", SELFTEST),
    "graphs-off": Rung("the same without CUDA graphs", SELFTEST, environment=GRAPHS_OFF),
    "graphs-on": Rung("the same, everything in CUDA graphs", SELFTEST, environment=GRAPHS_ON),
    "windows": Rung("the same on XLA's own buffers (jax 0.12)", SELFTEST, environment=WINDOWS),
    "cliques": Rung("communicators that XLA replaces, one process", CLIQUES),
    "processes": Rung("eight processes with one GPU each", SELFTEST, processes=True),
    "processes-graphs-on": Rung("the same, in CUDA graphs", SELFTEST, processes=True, environment=GRAPHS_ON),
    "processes-windows": Rung("the same on XLA's own buffers", SELFTEST, processes=True, environment=WINDOWS),
    "processes-cliques": Rung("communicators that XLA replaces, eight processes", CLIQUES, processes=True),
    "nodes": Rung("several nodes, which GIN connects", SELFTEST),
    "nodes-cliques": Rung("communicators that XLA replaces, several nodes", CLIQUES),
}


def climb(name: str, out: pathlib.Path, platform: str, patience: float) -> int:
    """Runs one rung. Under a launcher, only process 0 writes the record; others use a folder of their own."""
    rung = RUNGS[name]
    process = launchers.detect(os.environ)
    rank = int(os.environ.get("JAX_PROCESS_ID", process.rank if process else 0))
    if rank > 0:
        out = out / f"rank-{rank}"
    machine = Machine(out / "build", platform, "")
    report = out.resolve() / f"{name}-selftest.json"
    environment = {"JAXCOMM_ALGORITHM": "plans", **rung.environment}
    if platform == "cpu":
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1" if rung.processes else "8"}
        environment["XLA_FLAGS"] = ""  # XLA refuses flags of GPUs
    selftest = rung.program is SELFTEST
    options = ("--timeout", f"{patience * SELFTEST_S:g}", "--json", str(report)) if selftest else ()
    command = (*rung.command(), *options)
    facts = machine.facts() | {"rung": name, "what": rung.what, "environment": dict(rung.environment)}
    runner = Runner(name, out, out / "work", facts, LIMIT_S, patience)
    missing = machine.no_gpu if platform == "cuda" else ""
    keep = not selftest and not rung.processes and rank == 0  # a launcher changes the lines
    runner.run(Part(name, command, LIMIT_S, environment, missing, keep=keep))
    if report.exists():
        runner.record["selftest"] = json.loads(report.read_text())
        report.unlink()
        runner.save()
    runner.print_table()
    return 0 if runner.record["tests"].get(name) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", choices=["list", *RUNGS])
    parser.add_argument("out", type=pathlib.Path, nargs="?", default=pathlib.Path("build/gpu/records"))
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse on CPU devices")
    parser.add_argument("--patience", type=float, default=1, help="multiplies the limit, for slow machines")
    args = parser.parse_args()
    if args.rung == "list":
        for name, rung in RUNGS.items():
            variables = " ".join(f"{key}={value!r}" for key, value in rung.environment.items())
            print(f"{name:20} {rung.what}\n    {variables} {' '.join(rung.command())}".rstrip())
        return 0
    return climb(args.rung, args.out, args.platform, args.patience)


if __name__ == "__main__":
    sys.exit(main())
