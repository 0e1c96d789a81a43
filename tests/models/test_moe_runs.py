"""Complete runs of models/moe: data, checkpoints, resume, evaluation, samples, files."""

import dataclasses
import json
import math
import os
import signal
import types

import jax
import numpy as np
import plain
import pytest
from training import OPTIONS, TINY, flags, metrics, train_here

import jaxcomm
from models.lm import comm as comm_lib
from models.lm import config as config_lib
from models.lm import data
from models.lm import train as lm
from models.moe import train


class Crash(Exception):
    pass


@pytest.fixture
def after_step(monkeypatch):
    """after_step(n, action) calls action after step n, before the step is logged."""
    advance, actions = train.Run.advance, {}

    def advance_and_act(run):
        found = advance(run)
        actions.pop(run.step, lambda: None)()
        return found

    monkeypatch.setattr(train.Run, "advance", advance_and_act)
    return actions.__setitem__


def checkpoints(out):
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir())


def test_interrupted_run_continues_where_it_was_saved(alone, tmp_path, after_step):
    """Ctrl-C after step 2, then a crash two steps after the checkpoint of step 3."""
    wanted, _, summary = alone
    out = tmp_path / "run"
    after_step(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train_here(out)["interrupted"]
    assert checkpoints(out) == [2]
    assert metrics(out) == metrics(wanted)[:2]

    def crash():
        raise Crash

    after_step(6, crash)
    with pytest.raises(Crash):
        train_here(out, resume=True)
    assert [record["step"] for record in metrics(out)] == [1, 2, 3, 4, 4, 5]
    assert checkpoints(out) == [2, 3]

    config, resume = config_lib.parse(train.Config, ["--resume", "--out", str(out), "--eval_every", "4"])
    assert resume and config == dataclasses.replace(TINY, out=str(out))
    resumed = lm.train(train.Run(config, resume=resume))
    assert metrics(out) == metrics(wanted)  # bit for bit, evaluations included
    assert checkpoints(out) == [9, 12]
    for name in ("steps", "train_loss", "heldout_bits_per_byte", "sample"):
        assert resumed[name] == summary[name]


def test_evaluation_equals_that_of_one_device(alone):
    """On evenly spaced windows of the held-out text, with the last saved parameters."""
    out, run, summary = alone
    text = run.heldout_text
    count = TINY.eval_batches * TINY.batch
    starts = [(len(text) - TINY.seq - 1) * i // (count - 1) for i in range(count)]
    tokens = np.stack([text[start : start + TINY.seq + 1] for start in starts]).astype(np.int32)
    params = jax.device_put(jax.device_get(run.state[0]), jax.devices()[0])
    found = jax.jit(plain.metrics, static_argnums=(2, 3))(params, tokens, TINY, None)
    assert summary["heldout_bits_per_byte"] == pytest.approx(float(found["loss"]) / math.log(2), rel=1e-5)
    assert summary["heldout_dropped"] == found["dropped"] == 0
    losses = [record["loss"] for record in metrics(out) if "loss" in record]
    assert len(losses) == TINY.steps == summary["steps"]
    assert summary["train_loss"] == pytest.approx(np.mean(losses))


def test_each_step_uses_other_windows():
    text, seen = np.arange(250, dtype=np.uint8), []

    def step(state, tokens):
        seen.append(tokens)
        return state, {}

    program = types.SimpleNamespace(step=step)
    run = types.SimpleNamespace(
        config=TINY, train_text=text, step=0, state=None, put=lambda tokens: tokens, program=program
    )
    for _ in range(3):
        train.Run.advance(run)
    assert run.step == 3
    run.step = 1
    train.Run.advance(run)  # as a run that is continued there
    np.testing.assert_array_equal(seen[3], seen[1])
    run.config, run.step = dataclasses.replace(TINY, seed=1), 0
    train.Run.advance(run)
    for tokens in seen:
        assert tokens.shape == (TINY.batch, TINY.seq + 1)
        assert (np.diff(tokens, axis=1) == 1).all() and len(set(tokens[:, 0])) > 1
    starts = {tuple(tokens[:, 0]) for tokens in seen}
    assert len(starts) == 4


def test_loss_falls_and_files_are_written(tmp_path, text_folder, capsys):
    """Files of an earlier run are not continued without --resume."""
    out = tmp_path / "run"
    (out / "checkpoints" / "99").mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"step": 99, "loss": 1}\n')
    options = {**OPTIONS, "data": text_folder, "out": out, "steps": 25, "eval_every": 100, "save_every": 100}
    assert lm.main(train.Config, train.build, flags(**options), train.Run) == 0
    values = [record["loss"] for record in metrics(out) if "loss" in record]
    assert len(values) == 25
    assert np.mean(values[-3:]) < 0.75 * values[0]
    assert checkpoints(out) == [25]
    assert capsys.readouterr().out.splitlines()[-1].startswith("25 steps, training loss ")
    sample = (out / "sample.txt").read_bytes()
    assert sample.startswith(b"def") and len(sample) == 3 + TINY.sample
    options = json.loads((out / "config.json").read_text())
    assert options["steps"] == 25 and options["data"] == str(text_folder)


@pytest.mark.parametrize(
    ("ranks", "asked", "chosen"),
    [
        ([8], "direct", "direct"),
        ([4, 4], "direct", "hierarchical"),
        ([3, 5], "direct", None),
        ([1, 1], "direct", None),
        ([4, 4], "ring", "ring"),
        ([8], "", None),
    ],
)
def test_direct_sums_need_one_node(ranks, asked, chosen, monkeypatch):
    """Nodes can't read each other's memory. The hierarchical plan of equal nodes adds in the order of one process."""
    monkeypatch.setattr(jaxcomm, "topology", lambda: types.SimpleNamespace(ranks=ranks))
    for name in comm_lib.SUMS:
        monkeypatch.setattr(jaxcomm, name, lambda x, axes, algorithm: algorithm)
    found = train.load_comm(dataclasses.replace(TINY, psum=asked))
    assert {getattr(found, name)(0, "i") for name in comm_lib.SUMS} == {chosen}


def test_windows_reach_both_ends_of_the_text():
    text = np.arange(12, dtype=np.uint8)
    drawn = data.train_batch(text, 200, 10, 1, 0)
    assert set(drawn[:, 0]) == {0, 1, 2}
    assert data.train_batch(text, 2, 12, 1, 0).tolist() == [list(range(12))] * 2
    text = np.arange(210, dtype=np.uint8)
    held = data.heldout_batches(text, 4, 10, 3)
    assert held.shape == (3, 4, 10) and held.dtype == np.int32
    assert (np.diff(held, axis=2) == 1).all()
    np.testing.assert_array_equal(held[:, :, 0].reshape(-1), np.arange(12) * 200 // 11)
