"""The resources of a process don't grow with the number of its groups or of compiled programs."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

# Groups, programs, how often a program calls each of three collectives.
CASES = [
    (1, 10, 40, 5),
    *(pytest.param(*case, marks=pytest.mark.full) for case in [(1, 100, 300, 1), (2, 100, 100, 1)]),
    *(pytest.param(*case, marks=pytest.mark.stress) for case in [(1, 100, 1000, 1), (2, 100, 333, 1)]),
]
# JAX itself keeps about 45 KiB of each mesh, of each program 1 KiB or, if it has 15 calls, 40: without jaxcomm too (jax
# 0.12 and 0.10). A call site that isn't dropped holds some KiB, and each program here has at least three.
MAX_PRIVATE_KIB = {"groups": 8 << 10, "programs": 6 << 10}


@pytest.mark.deadline(400)
@pytest.mark.parametrize(("nodes", "groups", "programs", "calls"), CASES)
def test_groups_and_programs_leave_nothing_behind(nodes, groups, programs, calls):
    script = pathlib.Path(__file__).with_name("leaking.py")
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", "2", "--nodes", str(nodes), "--devices", "4"]
    command += [str(script), str(groups), str(programs), str(calls)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-4000:]
    for process in range(2):
        said = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith(f"[{process}] {{")]
        assert [s["what"] for s in said] == ["warm", "groups", "programs"]
        for before, after in itertools.pairwise(said):
            assert after["descriptors"] <= before["descriptors"], said
            assert after["threads"] <= before["threads"], said
            assert after["mappings"] <= before["mappings"] + 20, said  # of the allocator, which varies
            assert after["shared KiB"] <= before["shared KiB"] + 1024, said
            assert after["private KiB"] <= before["private KiB"] + MAX_PRIVATE_KIB[after["what"]], said
