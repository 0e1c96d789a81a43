"""python -m jaxcomm.selftest under the launcher."""

import json
import os
import subprocess
import sys

import pytest

LIMIT_S = 150
pytestmark = pytest.mark.deadline(LIMIT_S + 20)


@pytest.mark.full  # tests/test_selftest.py runs the same checks in one process
def test_two_processes(tmp_path):
    file = tmp_path / "selftest.json"
    launcher = (sys.executable, "-m", "jaxcomm.run", "-n", "2", "--devices", "2", "--timeout", str(LIMIT_S))
    command = (*launcher, "-m", "jaxcomm.selftest", "--json", str(file), "--sizes", "1K")
    environment = {name: value for name, value in os.environ.items() if name != "JAXCOMM_ALGORITHM"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 10, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert (found["processes"], found["devices"]) == (2, 4)
    assert all(row["wrong"] == 0 for row in found["rows"])
    assert done.stdout.count("# PASSED") == 1
