"""The example of two jobs, which compares its texts with those of one job."""

import pathlib
import subprocess
import sys

import pytest


@pytest.mark.full
def test_two_jobs_write_the_text_of_one():
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "examples.disaggregated.disaggregated", "--tokens", "8"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{n} bytes of prompt, 8 more: equal to one job's" for n in (16, 44, 1)]
