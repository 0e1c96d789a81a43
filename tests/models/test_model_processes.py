"""models/ in several processes: the losses, samples, files and checkpoints of one process."""

import json
import pathlib
import re
import signal

import pytest
from training import OPTIONS, flags, launch, metrics, train_here

LIMIT_S = 240
full = pytest.mark.full
pytestmark = pytest.mark.deadline(4 * LIMIT_S)

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


def run(folder, processes, *command, status=0):
    found, output = launch(folder, processes, *command, limit_s=LIMIT_S)
    assert found == status, output
    # Printed by the first process only. Gloo's own lines, which may be broken anywhere, have none of these words.
    assert not re.search(r"^\[[1-9]\] .*(step|loss|sample|parameters)", output, re.MULTILINE), output
    return output


def test_two_processes_and_one_compute_the_same(alone, tmp_path):
    """Two processes until one gets Ctrl-C, then one process: the results of a single process."""
    out, (wanted, _, summary) = tmp_path / "run", alone
    options = flags(**{**OPTIONS, "eval_every": 100}, out=out)
    (tmp_path / "script.py").write_text(WITH_SIGNAL)
    output = run(tmp_path, 2, "script.py", 5, 1, int(signal.SIGINT), *options, status=130)
    assert "[0] stopped after step 5" in output
    resumed = train_here(out, resume=True, eval_every=100)
    losses = [[record for record in metrics(folder) if "loss" in record] for folder in (out, wanted)]
    assert losses[0] == losses[1]  # bit for bit
    assert metrics(out)[-1] == metrics(wanted)[-1]  # held-out text
    assert resumed["sample"] == summary["sample"]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=full)])
def test_processes_read_each_byte_of_a_checkpoint_once(processes, tmp_path):
    """On another mesh. All processes read the index of the files; that is little."""
    (tmp_path / "restoring.py").write_text(pathlib.Path(__file__).with_name("restoring.py").read_text())
    said = [
        json.loads(text) for text in re.findall(r"\{.*\}", run(tmp_path, processes, "restoring.py", tmp_path / "at"))
    ]
    assert len(said) == processes
    read, saved = sum(process["read"] for process in said), said[0]["saved"]
    assert 0.8 * saved < read < 1.05 * saved, said  # TensorStore may have an array in its cache
    assert max(process["read"] for process in said) < 1.5 * saved / processes, said  # nine arrays of one size
