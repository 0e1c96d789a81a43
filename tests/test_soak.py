"""tests/soak.py for half a minute, in processes of one node and of two (`make soak` runs it for long)."""

import os
import pathlib
import subprocess
import sys

import pytest

# Processes, nodes, collectives.
CASES = {"2 x 4": (2, 1, 3000), "2 nodes x 2 x 2": (4, 2, 1000)}


@pytest.mark.parametrize("case", CASES)
def test_random_collectives(case):
    processes, nodes, collectives = CASES[case]
    script = pathlib.Path(__file__).with_name("soak.py")
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "--nodes", str(nodes)]
    command += ["--devices", str(8 // processes), str(script)]
    command += ["--collectives", str(collectives), "--programs", "16", "--stops", "2"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("all bytes right") == processes
