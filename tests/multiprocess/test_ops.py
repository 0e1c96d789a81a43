"""The tests of the ops, run by several processes of this host at once: 8 devices in all, the same contract.

Every process runs every test and sees the results of all ranks (harness.share), so all pass or fail together.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# What depends on where ranks and their memory are; the rest is the same for JAX. `make stress` runs everything.
PLACES = "algorithm or groups or sizes or dtype or axes or donation or equal or later or eager or ahead or bits"
PLANS = "algorithm or sizes or dtype"
PATHS = "sizes or dtype"
# Processes, nodes, single copies, tests of the default size and of others. With two copies, ranks of one node are spread
# over more processes than there are processors. Nodes are those of JAXCOMM_NODE_ID: processes of different ones use the
# network, if on one machine.
CASES = {
    "2 x 4": (2, 1, "1", f"{PLANS} or index_groups or donation or later", PLACES),
    "4 x 2, two copies": (4, 1, "0", PATHS, PLANS),
    "2 nodes x 2 x 2": (4, 2, "1", PLANS, PLANS),
}
EVERYTHING = int(os.environ.get("JAXCOMM_STRESS_ROUNDS", "1")) > 1


@pytest.mark.deadline(1500)
@pytest.mark.parametrize("case", CASES)
def test_contract_holds_between_processes(case, tmp_path, request):
    processes, nodes, single_copy, *selections = CASES[case]
    size = request.config.getoption("--size")
    environment = {
        **os.environ,
        "JAXCOMM_TEST_FOLDER": str(tmp_path),
        "JAXCOMM_TEST_NODES": str(nodes),
        "JAXCOMM_SINGLE_COPY": single_copy,
    }
    # Each process sets its number of devices itself. No plugin may write to a common folder.
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "--nodes", str(nodes)]
    command += ["-m", "pytest", "tests/ops", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["--size", size]
    command += [] if EVERYTHING else ["-k", selections[size != "default"]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    ends = re.findall(r"^\[\d+\] (\d+) passed", done.stdout, re.MULTILINE)
    assert len(ends) == processes and len(set(ends)) == 1 and int(ends[0]) >= 20
