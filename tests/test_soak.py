"""tests/soak.py for a moment, in processes of one node and of two (`make soak` runs it for long)."""

import os
import pathlib
import subprocess
import sys

import pytest

# Processes, nodes, programs, collectives.
CASES = [
    pytest.param(1, 1, 4, 150, id="1 x 8"),
    pytest.param(2, 2, 4, 150, id="2 nodes x 1 x 4"),
    pytest.param(2, 1, 16, 3000, id="2 x 4", marks=pytest.mark.full),
    pytest.param(4, 2, 16, 1000, id="2 nodes x 2 x 2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("processes", "nodes", "programs", "collectives"), CASES)
def test_random_collectives(processes, nodes, programs, collectives):
    script = pathlib.Path(__file__).with_name("soak.py")
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "--nodes", str(nodes)]
    command += ["--devices", str(8 // processes), str(script)]
    command += ["--collectives", str(collectives), "--programs", str(programs), "--stops", "1"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("all bytes right") == processes
