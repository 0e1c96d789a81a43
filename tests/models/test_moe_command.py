"""The command line of models/moe: progress, plot, exit status, failures. The training is a fake."""

import dataclasses
import math
import os
import pathlib
import signal
import sys
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

SPEED = TINY.batch * TINY.seq  # tokens per s of a step that takes a second


def test_text_must_fill_a_window_and_the_byte_after_it(tiny, monkeypatch):
    monkeypatch.setattr(data, "load", mock.Mock(side_effect=StopIteration))
    with pytest.raises(StopIteration):
        train.Run(tiny)
    data.load.assert_called_once_with(tiny.data, tiny.heldout, tiny.seq + 1)


def record(step):
    return {"step": step, "loss": 1 / step, "dropped": step % 2, "tokens_per_s": round(SPEED / step, 1)}


class Run(train.Run):
    """Continues after step 3 and 10 s. Step s takes s seconds of its clock, and nothing else takes time."""

    def __init__(self, out, leads=True, **options):
        self.config = dataclasses.replace(TINY, **options)
        self.out, self.leads, self.begin, self.clock = pathlib.Path(out), leads, 0, 10
        self.state = ({"x": np.zeros(3)},)
        self.train_text, self.heldout_text = b"text", b"held out"
        self.step, self.records, self.did = 3, [record(step) for step in (1, 2, 3)], []
        self.checkpoints = types.SimpleNamespace(close=lambda: self.did.append("close"))

    def any_process(self, flag):
        return flag

    def advance(self):
        self.step += 1
        self.clock += self.step
        return {"loss": self.loss(self.step), "dropped": self.step % 2}

    def loss(self, step):
        return 1 / step

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
def test_progress_and_results_of_the_first_process(tmp_path, monkeypatch, capsys, terminal, leads):
    """A bar on a terminal, else a line at most every 10 s. Losses and speeds are those of the last 20 steps."""
    bars, run = mock.MagicMock(), Run(tmp_path, leads, steps=25, eval_every=2, save_every=3)
    monkeypatch.setattr(lm, "tqdm", bars)
    monkeypatch.setattr(lm, "time", types.SimpleNamespace(monotonic=lambda: run.clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    summary, steps = lm.train(run), range(4, 26)
    options, bar = bars.call_args.kwargs, bars.return_value
    assert (options["total"], options["initial"], bar.update.call_count) == (25, 3, 22)
    assert options["disable"] == (not (terminal and leads))
    speeds = {step: np.median([SPEED / s for s in range(max(1, step - 19), step + 1)]) for step in steps}
    texts = {step: f"loss {1 / step:.3f}, {speeds[step]:,.0f} tokens/s" for step in steps}
    assert [call.args[0] for call in bar.set_postfix_str.call_args_list] == list(texts.values())
    first = (
        "3 parameters, 8 experts per layer: node 2 x gpu 4 on cpu devices in 1 processes, collectives of jaxcomm; 4 "
        "bytes of text, 8 held out. The first step compiles."
    )
    said, done = [first], []
    for step in steps:
        if not terminal and step not in (4, 5, 7, 9):  # the steps before have taken 4, 9, 7 and 9 s since the last line
            said.append(f"step {step}: {texts[step]}")
        if step % 2 == 0:
            said.append(f"step {step}: held-out 2.000 bits per byte")
            done.append(f"evaluate {step}")
        done += [f"save {step}"] * (step % 3 == 0)
    assert capsys.readouterr().out.splitlines() == said * leads
    # The last step is saved and evaluated once, with any intervals.
    assert run.did == [*done, "save 25", "close", "evaluate 25", *["plot"] * leads]
    assert run.records == [record(step) for step in range(1, 26)]
    loss = np.mean([1 / step for step in range(6, 26)])
    assert summary == {
        "steps": 25, "train_loss": pytest.approx(loss), "tokens_per_s": pytest.approx(speeds[25]), "seconds": 10 + 319,
        "train_dropped": 13 / 25, "heldout_bits_per_byte": 2.0, "heldout_dropped": 0.5, "sample": b"sample",
    }  # fmt: skip
    assert ", ".join(run.report(summary)) == (
        f"25 steps, training loss {loss:.3f} ({loss / math.log(2):.3f} bits per byte), held-out 2.000 bits per byte, "
        f"52.00% of the choices dropped (50.00% held-out), {speeds[25]:.0f} tokens/s, 329 s. Files: {tmp_path}/"
        "{checkpoints,config.json,loss.png,metrics.jsonl,sample.txt}"
    )
    assert capsys.readouterr().out == "--- sample ---\nsample\n--- end of sample ---\n"


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path):
    run = Run(tmp_path)
    run.loss = lambda step: math.nan if step == 6 else 1.0
    with pytest.raises(FloatingPointError, match="loss nan at step 6: try a smaller --lr"):
        lm.train(run)
    assert run.records[-1]["step"] == 6 and run.did == ["evaluate 4"]


def test_a_second_interrupt_stops_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), distributed.Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.asked
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with distributed.Interrupt():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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
