"""python -m jaxcomm.selftest under the launcher."""

import json
import os
import subprocess
import sys

import pytest

LIMIT_S = 150
pytestmark = pytest.mark.deadline(LIMIT_S + 20)


# The self-test, where a function raises in process 1 only: before process 0 waits for it, or after the last collective.
FAILING = """
import sys
import jax
import jaxcomm
from jaxcomm import selftest
from jaxcomm._measure import timing

owner, name = (jaxcomm, "barrier") if sys.argv[1] == "first" else (timing, "alternate")
right = getattr(owner, name)
def wrong(*args, **more):
    if name == "alternate":
        times = right(*args, **more)
    if jax.process_index() == 1:
        raise ValueError("only here")
    return times if name == "alternate" else right(*args, **more)
setattr(owner, name, wrong)
selftest.ALL_PROGRAMS.clear()
selftest._tests_of_experts = lambda *args: iter(())
sys.exit(selftest.main(sys.argv[2:]))
"""


def selftest(file, *program, **more):
    launcher = (sys.executable, "-m", "jaxcomm.run", "-n", "2", "--devices", "2", "--timeout", str(LIMIT_S))
    command = (*launcher, *program, "--json", str(file), "--sizes", "1K")
    environment = {name: value for name, value in os.environ.items() if name != "JAXCOMM_ALGORITHM"} | more
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 10, env=environment)
    assert file.exists(), done.stdout + done.stderr
    return done, json.loads(file.read_text())


@pytest.mark.parametrize("when", ["first", pytest.param("last", marks=pytest.mark.full)])
def test_process_0_records_the_error_of_another_one(when, tmp_path):
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    done, found = selftest(tmp_path / "selftest.json", str(program), when, "--ops", "barrier", JAXCOMM_TIMEOUT_S="20")
    assert done.returncode == 1, done.stdout + done.stderr
    assert found["result"] == "FAILED: 1 of 1 tests, in barrier"
    assert [row["error"] for row in found["rows"]] == ["process 1: ValueError: only here"]
