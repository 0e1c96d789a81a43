"""docs/guide/interoperation.md: jaxcomm and MPI in the same processes, on one node and on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_address

PREFIX = Path(sys.prefix)
LIMIT_S = 240


@pytest.mark.full
@pytest.mark.deadline(LIMIT_S + 30)
@pytest.mark.parametrize("arguments", [(), ("several nodes",)], ids=["one node", "two nodes"])
def test_collectives_and_mpi_in_two_threads(arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMI", "MPI"))}
    environment |= {
        "PATH": f"{PREFIX / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COORDINATOR_ADDRESS": free_address(),
    }
    launcher = ["timeout", "--kill-after=10", str(LIMIT_S), "mpirun", "-n", "2", "--bind-to", "none"]
    command = [*launcher, "--map-by", ":OVERSUBSCRIBE", sys.executable, Path(__file__).with_name("with_mpi.py")]
    run = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    libraries = dict(re.findall(r"process (\d): equal sums, (\S+)", run.stdout))
    assert sorted(libraries) == ["0", "1"], run.stdout
    assert all(("/libucx/" in path) == bool(arguments) for path in libraries.values()), libraries
