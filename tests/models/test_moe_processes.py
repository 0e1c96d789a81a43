"""models/moe in several processes: the losses, samples and files of one process."""

import re
import signal
import subprocess
import sys

import pytest
from training import OPTIONS, environment, flags, folder_to_start_in, metrics, train_here

from jaxcomm import run as launcher

LIMIT_S = 120

# models.moe.train, which sends a signal to one of its processes after a step: <step> <process> <signal> <options>.
WITH_SIGNAL = """
import os, sys
import jax
from models.lm.train import run_command
from models.moe import train

step, process, signum = (int(sys.argv.pop(1)) for _ in range(3))
advance = train.Run.advance

def advance_and_signal(run):
    metrics = advance(run)
    if (run.step, jax.process_index()) == (step, process):
        os.kill(os.getpid(), signum)
    return metrics

train.Run.advance = advance_and_signal
run_command(train.Config, train.build, train.Run)
"""

pytestmark = pytest.mark.deadline(2 * LIMIT_S)


@pytest.fixture
def launch(tmp_path):
    """Runs a script in several processes with 8 devices in all: (exit status, output)."""
    folder_to_start_in(tmp_path)

    def start(processes, script, *arguments):
        command = ["-m", script]
        if script != "models.moe.train":
            (tmp_path / "script.py").write_text(script)
            command = ["script.py"]
        done = subprocess.run(
            ["env", "--default-signal=INT", sys.executable, launcher.__file__, f"--processes={processes}",
             f"--devices={8 // processes}", f"--timeout={LIMIT_S}", *command, *map(str, arguments)],
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S + 30,
        )  # fmt: skip
        return done.returncode, done.stdout.decode(errors="replace")

    return start


def test_two_processes_and_one_compute_the_same(alone, launch, tmp_path):
    """Two processes until one gets Ctrl-C, then one process: the results of a single process."""
    out, (wanted, _, summary) = tmp_path / "run", alone
    options = flags(**{**OPTIONS, "eval_every": 100}, out=out)
    status, output = launch(2, WITH_SIGNAL, 5, 1, int(signal.SIGINT), *options)
    assert status == 130, output
    assert "[0] stopped after step 5" in output
    resumed = train_here(out, resume=True, eval_every=100)
    losses = [[record for record in metrics(folder) if "loss" in record] for folder in (out, wanted)]
    assert losses[0] == losses[1]  # bit for bit
    assert metrics(out)[-1] == metrics(wanted)[-1]  # held-out text
    assert resumed["sample"] == summary["sample"]
    # Gloo's own lines, which may be broken anywhere, have none of these words.
    assert not re.search(r"^\[1\] .*(step|parameters)", output, re.MULTILINE), output


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_finish_a_run_as_one_does(alone, launch, tmp_path, processes):
    out, alone = tmp_path / "run", alone[0]
    status, output = launch(processes, "models.moe.train", *flags(**OPTIONS, out=out))
    assert status == 0, output
    assert metrics(out) == metrics(alone)  # bit for bit
    assert (out / "sample.txt").read_bytes() == (alone / "sample.txt").read_bytes()
    assert (out / "loss.png").exists()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["12", "9"]
    lines = output.splitlines()
    assert (
        sum("held-out" in line for line in lines) == 3
    )  # two evaluations and the summary: printed by one process only
    # Gloo's own lines, which may be broken anywhere, have none of these words.
    assert not re.search(r"^\[[1-9]\] .*(step|loss|sample|parameters)", output, re.MULTILINE), output
