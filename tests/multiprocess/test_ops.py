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
# Everything between two processes. Then what depends on where memory is, with two copies instead of one and ranks of
# one node spread over more processes than there are processors.
CASES = {
    "2 x 4": (2, "1", []),
    "4 x 2, two copies": (4, "0", ["-k", "algorithm or groups or sizes or dtype or axes or donation or equal or later"]),
}


@pytest.mark.deadline(1500)
@pytest.mark.parametrize("case", CASES)
def test_contract_holds_between_processes(case, tmp_path):
    processes, single_copy, selection = CASES[case]
    environment = {**os.environ, "JAXCOMM_TEST_FOLDER": str(tmp_path), "JAXCOMM_SINGLE_COPY": single_copy}
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", str(processes), "-m", "pytest", "tests/ops", "-x"]
    # Each process sets its number of devices itself. No plugins that write to a common folder.
    command += ["-q", "--no-header", "-p", "no:cacheprovider", *selection]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    ends = re.findall(r"^\[\d+\] (\d+) passed", done.stdout, re.MULTILINE)
    assert len(ends) == processes and len(set(ends)) == 1 and int(ends[0]) > 400
