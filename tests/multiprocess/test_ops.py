"""Collectives between processes of this host, 8 devices in all.

The default size checks values with tests/hosts/collectives.py. The full size runs the tests of the ops: every process
runs every test and sees the results of all ranks (harness.share), so all pass or fail together.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Tests that depend on the placement of ranks and memory; others are equal for JAX. `make stress` runs all.
PLACES = "algorithm or groups or sizes or dtype or axes or donation or equal or later or eager or ahead or bits"
PLANS = "algorithm or sizes or dtype"
# Processes, nodes, single copies, tests. With two copies, ranks of one node are spread over more processes than there
# are processors. Nodes are those of JAXCOMM_NODE_ID: processes of different ones use the network, if on one machine.
CASES = {
    "2 x 4": (2, 1, "1", PLACES),
    "4 x 2, two copies": (4, 1, "0", PLANS),
    "2 nodes x 2 x 2": (4, 2, "1", PLANS),
}


def launched(processes, nodes, program, timeout_s, **settings):
    """The output of processes that end well."""
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "--nodes", str(nodes), *program]
    env = {**os.environ, **settings}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.deadline(500)
@pytest.mark.parametrize(("processes", "nodes", "single_copy"), [(4, 2, "1"), (2, 1, "0")])
def test_values(processes, nodes, single_copy, request):
    """One group over devices of a process, processes of a node and several nodes. Then with two copies."""
    settings = {"JAXCOMM_SINGLE_COPY": single_copy, "DEVICES": str(8 // processes)}
    settings["SIZE"] = request.config.getoption("--size")
    out = launched(processes, nodes, ["tests/hosts/collectives.py"], 450, **settings)
    (said,) = (json.loads(line[4:]) for line in out.splitlines() if line.startswith("[0] {"))
    assert said["checked"]


@pytest.mark.full
@pytest.mark.deadline(1500)
@pytest.mark.parametrize("case", CASES)
def test_contract_holds_between_processes(case, tmp_path, request):
    processes, nodes, single_copy, selection = CASES[case]
    settings = {"JAXCOMM_TEST_FOLDER": str(tmp_path), "JAXCOMM_TEST_NODES": str(nodes)}
    # Each process sets its number of devices itself. No plugin may write to a common folder.
    program = ["-m", "pytest", "tests/ops", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--size", "full"]
    program += [] if request.config.getoption("--size") == "stress" else ["-k", selection]
    out = launched(processes, nodes, program, 1400, JAXCOMM_SINGLE_COPY=single_copy, **settings)
    ends = re.findall(r"^\[\d+\] (\d+) passed", out, re.MULTILINE)
    assert len(ends) == processes and len(set(ends)) == 1 and int(ends[0]) > 90
