"""models/moe: routing and layer against plain oracles, gradients against one device, resume, data, command line.

Guards against the ways in which a distributed mixture of experts goes wrong without failing: gradients scaled by the
number of ranks, tokens returned to the wrong place, the wrong token dropped, a continued run that drifts.
"""

import dataclasses
import functools
import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomm
from models.moe import config as config_lib
from models.moe import data, train
from models.moe import model as model_lib
from models.moe import step as step_lib
from models.moe.config import Config
from models.moe.model import AXES, TOP_K

COMMS = {"jaxcomm": jaxcomm, "lax": jax.lax}
TINY = Config(
    layers=1, width=16, heads=2, hidden=16, batch=8, seq=16, steps=6, warmup=2, decay_steps=20, lr=1e-2,
    eval_every=4, eval_batches=1, save_every=4, sample=8, prompt="def",
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return train.make_mesh(TINY)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        lines = [f"def function_{number}_{line}(x):\n    return x + {line * number}\n" for line in range(20)]
        (folder / f"file_{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def tiny(tmp_path, text_folder):
    return dataclasses.replace(TINY, data=str(text_folder), out=str(tmp_path / "run"))


def train_run(config, resume=False):
    return train.train(train.Run(config, resume))


def losses(out):
    records = map(json.loads, (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


# Routing.


def route_oracle(logits, capacity):
    """Token by token, as the definition reads: (kept (t, TOP_K) bool, slot number, expert)."""
    logits = np.asarray(logits)
    expert = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    kept, slot = np.zeros(expert.shape, bool), np.zeros(expert.shape, int)
    used = np.zeros(logits.shape[1], int)
    for k in range(TOP_K):
        for token in range(len(logits)):
            i = expert[token, k]
            kept[token, k], slot[token, k] = used[i] < capacity, used[i]
            used[i] += 1
    return kept, slot, expert


def test_first_choices_come_before_second_ones():
    # Tokens 0 and 1 prefer expert 0, then 1; tokens 2 and 3 the other way around; there are three slots at each.
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.3, 0.6, 0.1]]))
    routing = model_lib.route(logits, 3)
    # Expert 0 serves tokens 0, 1, then the second choice of token 2; that of token 3 is dropped. Expert 1 alike.
    np.testing.assert_array_equal(routing.slot, [[0, 5], [1, 9], [3, 2], [4, 9]])
    np.testing.assert_array_equal(routing.token, [0, 1, 2, 2, 3, 0, 4, 4, 4])
    np.testing.assert_allclose(routing.weight, np.full((4, 2), [2 / 3, 1 / 3]), rtol=1e-6)
    assert routing.stats.dropped == 2 / 8


@pytest.mark.parametrize("capacity", [1, 3, 7, 40])
@pytest.mark.parametrize("experts", [2, 8, 13])
def test_route_matches_the_loop(capacity, experts):
    logits = np.random.default_rng([capacity, experts]).normal(size=(40, experts)).astype(np.float32)
    routing = model_lib.route(jnp.asarray(logits), capacity)
    kept, slot, expert = route_oracle(logits, capacity)
    np.testing.assert_array_equal(routing.slot, np.where(kept, expert * capacity + slot, experts * capacity))
    token_in = np.full(experts * capacity, 40)
    for token, k in np.argwhere(kept):
        token_in[expert[token, k] * capacity + slot[token, k]] = token
    np.testing.assert_array_equal(routing.token, token_in)
    assert float(routing.stats.dropped) == pytest.approx(1 - kept.mean())
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    load = np.bincount(expert[:, 0], minlength=experts) / 40
    assert float(routing.stats.balance) == pytest.approx(experts * (load * probs.mean(0)).sum(), rel=1e-5)


def test_balance_is_one_when_even_and_high_when_not():
    even = 20 * jnp.eye(8)
    assert model_lib.route(even, 8).stats.balance == pytest.approx(1)
    assert model_lib.route(jnp.tile(even[:1], (8, 1)), 8).stats.balance == pytest.approx(8)


# The layer, distributed, against every expert applied to every token on one device.


def dense_layer(params, x, kept, expert):
    """(t, d) -> (t, d): the definition without any dispatch; differentiable."""
    probs = jax.nn.softmax(x @ params["router"])
    weight = jnp.take_along_axis(probs, expert, axis=1)
    weight = weight / weight.sum(1, keepdims=True) * kept
    hidden = jnp.square(jax.nn.relu(jnp.einsum("td,edf->tef", x, params["up"])))
    results = jnp.einsum("tef,efd->ted", hidden, params["down"])
    return (jnp.take_along_axis(results, expert[:, :, None], axis=1) * weight[:, :, None]).sum(1)


@pytest.mark.parametrize(("comm", "check_vma"), [("jaxcomm", True), ("jaxcomm", False), ("lax", True)])
@pytest.mark.parametrize(("experts", "factor"), [(8, None), (16, 0.75), (8, 1.0)])
def test_layer_matches_dense_reference(mesh, comm, check_vma, experts, factor):
    ranks, tokens = 8, 12
    config = dataclasses.replace(TINY, experts=experts)
    graphdef, state = nnx.split(model_lib.MoE(config, nnx.Rngs(0)), nnx.Param)
    params = nnx.to_pure_dict(state)
    specs = {"router": P(), "up": P(AXES), "down": P(AXES)}
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (ranks * tokens, config.width))
    target = jax.random.normal(keys[1], x.shape)

    def local(params, x, target):
        params = {**params, "router": jax.lax.pcast(params["router"], AXES, to="varying")}

        def objective(params, x):
            y, _ = nnx.merge(graphdef, params)(x, factor, COMMS[comm])
            return (y * target).sum(), y

        (grads, dx), y = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
        return y, dx, step_lib.sum_replicated(grads, specs, COMMS[comm])

    inputs = (specs, P(AXES), P(AXES))
    outputs = (P(AXES), P(AXES), specs)
    run = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=check_vma)
    y, dx, grads = jax.jit(run)(params, x, target)

    capacity = model_lib.slots_per_expert(tokens, experts, factor)
    groups = [route_oracle(part @ params["router"], capacity) for part in jnp.split(x, ranks)]
    kept, _, expert = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    assert kept.all() == (factor is None)

    def reference(params, x):
        y = dense_layer(params, x, kept, expert)
        return (y * target).sum(), y

    (expected, expected_dx), expected_y = jax.jit(jax.grad(reference, argnums=(0, 1), has_aux=True))(params, x)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(y, expected_y)
    close(dx, expected_dx)
    for name in params:
        close(grads[name], expected[name], err_msg=name)


@pytest.mark.parametrize("comm", COMMS)
def test_gradients_of_the_model_match_one_device(mesh, comm):
    """The model on 8 ranks against the mean loss of the 8 groups of tokens on one device that holds all experts."""
    config = dataclasses.replace(TINY, layers=2, capacity=1.0, batch=16)
    graphdef, (specs, _), init = step_lib.init_state(config)
    params, _ = jax.jit(init)()
    tokens = jax.random.randint(jax.random.key(2), (config.batch, config.seq + 1), 0, 256)
    grads_of = step_lib.make_grads(config, graphdef, specs, COMMS[comm])
    run = jax.shard_map(grads_of, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(specs, P()))
    grads, metrics = jax.jit(run)(params, tokens)

    def reference(params):
        """Mean over all bytes, written anew: a factor in make_loss that depends on the number of ranks must show."""
        groups = tokens.reshape(config.num_ranks, -1, config.seq + 1)
        model = nnx.merge(graphdef, params)
        logits, stats = jax.vmap(lambda group: model(group[:, :-1], capacity_factor=config.capacity))(groups)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), groups[:, :, 1:, None], axis=-1)
        return -picked.mean() + config.balance * stats.balance.mean()

    value, expected = jax.jit(jax.value_and_grad(reference))(params)
    assert float(metrics["loss"] + config.balance * metrics["balance"]) == pytest.approx(float(value), rel=1e-5)
    assert metrics["dropped"] > 0
    flat = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True)
    for (path, grad), want in flat:
        name = jax.tree_util.keystr(path)
        assert np.abs(want).max() > 0, name
        np.testing.assert_allclose(grad, want, rtol=1e-3, atol=1e-6, err_msg=name)


def test_every_expert_is_on_one_device_only():
    _, specs, init = step_lib.init_state(TINY)
    shapes = jax.eval_shape(init)
    for spec, shape in zip(jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True):
        assert spec == (P(AXES) if len(shape.shape) == 3 else P())


# Whole runs.


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_folder):
    """Options and summary of an uninterrupted run."""
    config = dataclasses.replace(TINY, data=str(text_folder), out=str(tmp_path_factory.mktemp("whole")))
    return config, train_run(config)


def test_resumed_run_has_the_same_losses(whole, tiny):
    uninterrupted, summary = whole
    assert summary["steps"] == len(losses(uninterrupted.out)) == 6
    train_run(dataclasses.replace(tiny, steps=3, sample=0))
    config, resume = config_lib.parse(["--resume", "--out", tiny.out, "--steps", "6", "--sample", str(tiny.sample)])
    assert resume and config == tiny
    resumed = train_run(config, resume)
    assert losses(tiny.out) == losses(uninterrupted.out)  # bit for bit
    assert resumed["heldout_bits_per_byte"] == summary["heldout_bits_per_byte"]
    assert resumed["sample"] == summary["sample"]


def test_jaxcomm_and_lax_give_the_same_losses(whole, tiny):
    ours, _ = whole
    train_run(dataclasses.replace(tiny, comm="lax", sample=0))
    assert ours.comm == "jaxcomm"
    assert losses(ours.out) == losses(tiny.out)  # bit for bit: the default --psum adds in XLA's order


def test_loss_falls_and_files_are_written(tiny, capsys):
    argv = []
    for name, value in dataclasses.asdict(dataclasses.replace(tiny, steps=25)).items():
        argv += [f"--{name}", str(value)]
    assert train.main(argv) == 0
    values = list(losses(tiny.out).values())
    assert len(values) == 25
    assert np.mean(values[-3:]) < 0.75 * values[0]
    out = pathlib.Path(tiny.out)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoints" / "25").is_dir()
    printed = capsys.readouterr().out
    for part in ("25 steps", "held-out", "tokens/s", str(out)):
        assert part in printed.splitlines()[-1]
    sample = (out / "sample.txt").read_bytes()
    assert sample.startswith(b"def") and len(sample) == 3 + tiny.sample


def test_ctrl_c_ends_the_step_and_saves(whole, tiny, monkeypatch):
    advance = train.Run.advance

    def advance_and_interrupt(run):
        metrics = advance(run)
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    monkeypatch.setattr(train.Run, "advance", advance_and_interrupt)
    assert train_run(tiny)["interrupted"]
    assert list(losses(tiny.out).values()) == list(losses(whole[0].out).values())[:2]
    assert (pathlib.Path(tiny.out) / "checkpoints" / "2").is_dir()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_is_the_same_in_every_mode(mesh, dtype):
    """jax.lax and jaxcomm with the algorithms of its choice, with and without check_vma."""
    config = dataclasses.replace(TINY, dtype=dtype)
    graphdef, specs, init = step_lib.init_state(config)
    init = jax.jit(init)
    tokens = jax.random.randint(jax.random.key(2), (config.batch, config.seq + 1), 0, 256)
    results = []
    for comm, check_vma in [(jax.lax, True), (jaxcomm, True), (jaxcomm, False)]:
        step = step_lib.make_step(config, mesh, graphdef, specs, comm, check_vma)
        results.append(jax.tree.leaves(step(init(), tokens)))
    for expected, *others in zip(*results, strict=True):
        for other in others:
            np.testing.assert_allclose(np.asarray(other), np.asarray(expected), rtol=1e-4, atol=1e-6)


def test_greedy_sample_takes_the_likeliest_byte(tiny):
    run = train.Run(dataclasses.replace(tiny, temperature=0.0, sample=30))
    text = np.frombuffer(run.sample(), np.uint8).astype(np.int32)
    assert text.shape == (33,)
    params = jax.device_get(run.state[0])
    likeliest = jax.jit(lambda window: nnx.merge(run.graphdef, params)(window[None])[0][0].argmax(-1))
    for start in range(len(text) - tiny.seq):
        first = len(tiny.prompt) - 1 if start == 0 else tiny.seq - 1  # with less than a window of text: all places
        window = text[start : start + tiny.seq + 1]
        np.testing.assert_array_equal(window[first + 1 :], likeliest(window[:-1])[first:])


# Data.


def test_split_is_disjoint_complete_and_stable(text_folder):
    names = list(data.read_folder(text_folder))
    training, heldout = data.split_names(names, 0.2)
    assert training and heldout and sorted(training + heldout) == names
    fewer = [name for name in names if name != heldout[0]]
    assert data.split_names(fewer, 0.2) == (training, heldout[1:])
    assert data.split_names(["a", "b"], 1e-9)[1] and data.split_names(["a", "b"], 1 - 1e-9)[0]


def test_standard_library_is_found_and_split():
    contents = data.read_folder()
    assert len(contents) > 100 and all(name.endswith(".py") for name in contents)
    training, heldout = data.split_names(list(contents), 0.05)
    assert 0.02 < len(heldout) / len(contents) < 0.1
    assert not set(training) & set(heldout)


def test_binary_and_hidden_files_are_no_text(tmp_path):
    for name, text in {"b": b"bb", "a": b"aa", ".hidden": b"x", "image": b"\x89\0"}.items():
        (tmp_path / name).write_bytes(text)
    assert data.read_folder(tmp_path) == {"a": b"aa", "b": b"bb"}
    training, heldout = data.load(tmp_path, 0.5, 2)
    assert {bytes(training), bytes(heldout)} == {b"aa", b"bb"}


def test_batches_depend_on_seed_and_step_only():
    text = np.arange(200, dtype=np.uint8)
    batch = functools.partial(data.train_batch, text, 4, 10)
    np.testing.assert_array_equal(batch(1, 2), batch(1, 2))
    assert (batch(1, 2) != batch(1, 3)).any() and (batch(1, 2) != batch(2, 2)).any()
    assert (np.diff(batch(1, 2), axis=1) == 1).all()
    assert data.heldout_batches(text, 4, 10, 3).max() == 199


# Errors.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--experts", "12"], "--experts: got 12, expected a multiple of 2 nodes x 4 gpus = 8 devices"),
        (["--batch", "9"], "--batch: got 9"),
        (["--steps", "0"], "--steps: got 0, expected at least 1"),
        (["--lr", "-1"], "--lr: got -1.0, expected above 0"),
        (["--heads", "3"], "--width: got 128, expected a multiple of 2 * heads = 6"),
        (["--comm", "mpi"], "invalid choice: 'mpi'"),
        (["--resume", "--out", "does/not/exist"], "no run to continue"),
    ],
)
def test_bad_options_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        config_lib.parse(argv)
    assert message in capsys.readouterr().err


def test_resume_refuses_another_model(tiny):
    pathlib.Path(tiny.out).mkdir()
    tiny.save(pathlib.Path(tiny.out) / "config.json")
    with pytest.raises(ValueError, match="--width: got 32, but the run to resume has 16"):
        config_lib.load(pathlib.Path(tiny.out) / "config.json", {"width": 32})


def test_unknown_algorithm_is_named(tiny):
    with pytest.raises(ValueError, match="--psum: got 'fast', expected one of"):
        train.load_comm(dataclasses.replace(tiny, psum="fast"))


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        data.load(str(tmp_path / "missing"), 0.1, 10)
    with pytest.raises(ValueError, match="0 text files in"):
        data.load(str(tmp_path), 0.1, 10)
    for name in "ab":
        (tmp_path / name).write_text("short")
    with pytest.raises(ValueError, match="5 bytes of training text, expected at least 10"):
        data.load(str(tmp_path), 0.1, 10)
