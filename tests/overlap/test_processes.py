"""Computations run beside a transfer between processes: of one node, and of two nodes."""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_computation_runs_beside_the_transfer(tmp_path, nodes):
    launcher = ("-m", "jaxcomm.run", "--processes", "2", "--devices", "1", "--nodes", str(nodes))
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    done = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / "between_processes.py"), str(tmp_path)],
        env=environment | {"JAXCOMM_CALIBRATION": ""}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"], done.stdout + done.stderr
