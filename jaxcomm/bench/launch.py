"""Measurements between processes: starts the processes, and measures in each of them."""

import argparse
import json
import os
import pathlib
import re
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
from jaxcomm._measure.collectives import Group
from jaxcomm._measure.process_group import ProcessGroup
from jaxcomm.bench import records, sweep
from jaxcomm.bench.records import Record
from jaxcomm.distributed import initialize

# Environment variable of the measuring processes: the folder that they share.
FOLDER = "JAXCOMM_BENCH_FOLDER"


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
            process.terminate()  # jaxcomm.run then ends its processes
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit status {process.returncode}")


def measure_processes(argv: Sequence[str], args: argparse.Namespace, run: dict[str, Any]) -> list[Record]:
    """Runs this program in processes, once per shape."""
    results: list[Record] = []
    signal.signal(
        signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum)
    )  # the exit ends the started processes too
    with tempfile.TemporaryDirectory(prefix="jaxcomm-bench-") as name:
        folder = pathlib.Path(name)
        for processes, devices in args.processes:
            ProcessGroup.prepare(folder, processes)
            (folder / "run.json").write_text(json.dumps(run))
            records.save(str(folder / "records.json"), run, results)
            command = [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "--devices", str(devices)]
            environment = _environment(devices) | {FOLDER: name}
            for line in _lines([*command, "-m", "jaxcomm.bench", *argv], environment):
                if not line.startswith("[Gloo]"):
                    print(line, flush=True)
            results = records.load(str(folder / "records.json"))[1]
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
