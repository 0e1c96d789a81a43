"""The command line of models/moe: progress, plot, exit status, failures. The training is a fake."""

import dataclasses
import math
import os
import pathlib
import sys
import time
import types
from unittest import mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from training import TINY

from models.lm import data, distributed
from models.lm import train as lm
from models.moe import train


def test_text_must_fill_a_window_and_the_byte_after_it(tiny, monkeypatch):
    class Loaded(Exception):
        pass

    def load(*arguments):
        raise Loaded(*arguments)

    monkeypatch.setattr(data, "load", load)
    with pytest.raises(Loaded) as loaded:
        train.Run(tiny)
    assert loaded.value.args == (tiny.data, tiny.heldout, tiny.seq + 1)


class Run(train.Run):
    """A run whose steps take no time."""

    def __init__(self, out, leads=True, **options):
        self.config = dataclasses.replace(TINY, **options)
        self.out, self.leads, self.begin = pathlib.Path(out), leads, time.monotonic()
        self.state = ({"x": np.zeros(3)},)
        self.train_text = self.heldout_text = b"text"
        self.step, self.records, self.did = 0, [], []
        self.checkpoints = types.SimpleNamespace(close=lambda: self.did.append("close"))

    def any_process(self, flag):
        return flag

    def advance(self):
        self.step += 1
        return {"loss": 1.0 / self.step, "dropped": self.step % 2}

    def log(self, **record):
        self.records.append({"step": self.step, **record})

    def evaluate(self):
        self.did.append(f"evaluate {self.step}")
        return {"heldout_bits_per_byte": 2.0, "heldout_dropped": 0.5}

    def save(self):
        self.did.append(f"save {self.step}")

    def sample(self):
        return b"sample"

    def plot(self):
        self.did.append("plot")


@pytest.mark.parametrize(("terminal", "leads"), [(True, True), (True, False), (False, True)])
def test_the_bar_follows_the_steps_of_the_first_process_on_a_terminal(tmp_path, monkeypatch, terminal, leads):
    bars = mock.MagicMock()
    monkeypatch.setattr(lm, "tqdm", bars)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    run = Run(tmp_path, leads, steps=5, eval_every=2, save_every=3)
    summary = lm.train(run)
    options, bar = bars.call_args.kwargs, bars.return_value
    assert (options["total"], options["initial"], bar.update.call_count) == (5, 0, 5)
    assert options["disable"] == (not (terminal and leads))
    texts = [call.args[0].split(",")[0] for call in bar.set_postfix_str.call_args_list]
    assert texts == [f"loss {1 / step:.3f}" for step in range(1, 6)]
    # The last step is saved and evaluated once, with any intervals.
    ended = ["evaluate 2", "save 3", "evaluate 4", "save 5", "close", "evaluate 5"]
    assert run.did == ended + ["plot"] * leads
    assert summary["train_loss"] == pytest.approx(np.mean([1 / step for step in range(1, 6)]))
    assert (summary["steps"], summary["sample"], summary["train_dropped"]) == (5, b"sample", 0.6)


def test_the_curve_shows_steps_and_evaluations_in_bits(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    records = [
        {"step": 1, "loss": 2 * math.log(2)},
        {"step": 2, "loss": math.log(2)},
        {"step": 2, "heldout_bits_per_byte": 1.5},
    ]
    train.Run.plot(types.SimpleNamespace(config=TINY, records=records, out=tmp_path))
    monkeypatch.undo()
    (figure,) = figures
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines == {"training": [[1, 2], [2, 1]], "held-out": [[2, 1.5]]}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plt.close(figure)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(ValueError("only here"), 1, "ValueError: only here"), (SystemExit("error: no text"), 1, "error: no text"),
     (KeyboardInterrupt(), 130, "KeyboardInterrupt")],
)  # fmt: skip
def test_a_failure_ends_one_of_several_processes_at_once(monkeypatch, capfd, error, status, said):
    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    with pytest.raises(type(error)), distributed.prompt_failure():
        raise error  # a single process raises as usual
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) as ended, distributed.prompt_failure():
        raise error
    assert ended.value.args == (status,)
    assert capfd.readouterr().err.splitlines()[-1] == said
