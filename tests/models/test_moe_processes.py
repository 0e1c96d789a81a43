"""models/moe in several processes: the losses of one process, checkpoints for every layout, common failure."""

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

FAILS = """
import time
import jax
from models.lm import distributed

with distributed.prompt_failure():
    distributed.initialize()
    if jax.process_index() == 1:
        raise ValueError("only here")
    time.sleep(1000)
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


@pytest.mark.full
def test_processes_drop_the_choices_that_one_does(launch, tmp_path):
    """--moe capacity, with fewer slots than an even load needs."""
    options = {**OPTIONS, "steps": 4, "moe": "capacity", "capacity": 0.5}
    out, alone = tmp_path / "run", tmp_path / "alone"
    train_here(alone, **options)
    status, output = launch(2, "models.moe.train", *flags(**options, out=out))
    assert status == 0, output
    assert metrics(out) == metrics(alone)  # bit for bit
    assert all(record["dropped"] > 0 for record in metrics(out) if "loss" in record)


@pytest.mark.full
def test_every_layout_continues_runs_of_other_layouts(alone, launch, tmp_path):
    """1 process, then 2 (one is killed), 4 (one gets Ctrl-C) and 1: the losses of an uninterrupted run."""
    out, alone = tmp_path / "run", alone[0]
    train_here(out, steps=3, sample=0)
    resume = ["--resume", *flags(out=out, steps=12, eval_every=100)]  # saves the compilation of the evaluation

    status, output = launch(2, WITH_SIGNAL, 7, 1, int(signal.SIGKILL), *resume)
    assert status == 128 + signal.SIGKILL, output
    assert "rank 1 failed: SIGKILL" in output
    assert [r["step"] for r in metrics(out)][-1] >= 6

    status, output = launch(4, WITH_SIGNAL, 9, 3, int(signal.SIGINT), *resume)
    assert status == 130, output
    assert "[0] stopped after step 9" in output

    summary = train_here(out, resume=True)
    wanted = metrics(alone)
    assert [r for r in metrics(out) if "loss" in r] == [r for r in wanted if "loss" in r]  # bit for bit
    assert metrics(out)[-1] == wanted[-1]  # held-out text
    assert summary["sample"] == (alone / "sample.txt").read_bytes()


def test_an_error_in_one_process_ends_all(launch):
    status, output = launch(2, FAILS)
    assert status == 1, output
    assert "ValueError: only here" in output and "rank 1 failed: exit code 1" in output
