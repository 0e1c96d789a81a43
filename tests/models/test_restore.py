"""A checkpoint on another mesh: each byte is read by one process, and the others get it by the network."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from training import environment, folder_to_start_in

from jaxcomm import run as launcher

LIMIT_S = 200


@pytest.mark.deadline(LIMIT_S + 60)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_read_each_byte_once(processes, tmp_path):
    """All processes read the index of the files; that is little."""
    folder_to_start_in(tmp_path)
    done = subprocess.run(
        [sys.executable, launcher.__file__, f"--processes={processes}", f"--devices={8 // processes}",
         f"--timeout={LIMIT_S}", str(pathlib.Path(__file__).with_name("restoring.py")), str(tmp_path / "checkpoints")],
        cwd=tmp_path, env=environment() | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=LIMIT_S + 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(text) for text in re.findall(r"\{.*\}", done.stdout)]
    assert len(said) == processes, done.stdout
    read, saved = sum(process["read"] for process in said), said[0]["saved"]
    assert 0.8 * saved < read < 1.05 * saved, said  # TensorStore may have an array in its cache
    assert max(process["read"] for process in said) < 1.5 * saved / processes, said  # nine arrays of one size
