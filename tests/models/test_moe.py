"""The layers of models/moe: routing and experts against plain oracles, gradients against one device.

Guards against silent errors of a distributed mixture of experts: gradients scaled by the number of ranks, tokens
returned to the wrong place, the wrong token dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from training import TINY

import jaxcomm
from models.lm import comm as comm_lib
from models.lm import step as lm_step
from models.moe import dropless
from models.moe import model as model_lib
from models.moe import step as step_lib
from models.moe.model import AXES, TOP_K

COMMS = {"jaxcomm": jaxcomm, "lax": comm_lib.with_synchronous_starts(jax.lax)}


# Routing.


@functools.partial(jax.jit, static_argnums=1)
def route(logits, capacity):
    return model_lib.route(model_lib.choose(logits), logits.shape[1], capacity)


def route_oracle(logits, capacity):
    """The definition, token by token: (kept (t, TOP_K) bool, slot number, expert)."""
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
    routing = route(logits, 3)
    # Expert 0 gets tokens 0, 1 and the second choice of token 2; that of token 3 is dropped. Expert 1 is symmetric.
    np.testing.assert_array_equal(routing.slot, [[0, 5], [1, 9], [3, 2], [4, 9]])
    np.testing.assert_array_equal(routing.token, [0, 1, 2, 2, 3, 0, 4, 4, 4])
    np.testing.assert_allclose(routing.weight, np.full((4, 2), [2 / 3, 1 / 3]), rtol=1e-6)
    assert routing.stats.dropped == 2 / 8


@pytest.mark.parametrize(
    ("experts", "capacity"),
    [(e, c) if (e, c) in [(2, 40), (8, 7), (13, 3)] else pytest.param(e, c, marks=pytest.mark.full)
     for e in (2, 8, 13) for c in (1, 3, 7, 40)],
)  # fmt: skip
def test_route_matches_the_loop(capacity, experts):
    logits = np.random.default_rng([capacity, experts]).normal(size=(40, experts)).astype(np.float32)
    routing = route(logits, capacity)
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
    assert route(even, 8).stats.balance == pytest.approx(1)
    assert route(jnp.tile(even[:1], (8, 1)), 8).stats.balance == pytest.approx(8)


# The distributed layer against every expert applied to every token on one device.


def dense_layer(params, x, kept, expert):
    """(t, d) -> (t, d): the definition without any dispatch; differentiable."""
    probs = jax.nn.softmax(x @ params["router"])
    weight = jnp.take_along_axis(probs, expert, axis=1)
    weight = weight / weight.sum(1, keepdims=True) * kept
    hidden = jnp.square(jax.nn.relu(jnp.einsum("td,edf->tef", x, params["up"])))
    results = jnp.einsum("tef,efd->ted", hidden, params["down"])
    return (jnp.take_along_axis(results, expert[:, :, None], axis=1) * weight[:, :, None]).sum(1)


LAYERS = [(comm, check_vma, experts, factor)
          for comm, check_vma in (("jaxcomm", True), ("jaxcomm", False), ("lax", True))
          for experts, factor in ((8, None), (16, None), (16, 0.75), (8, 1.0))]  # fmt: skip


@pytest.mark.parametrize(
    ("comm", "check_vma", "experts", "factor"),
    [case if case[:3] == ("jaxcomm", True, 16) else pytest.param(*case, marks=pytest.mark.full) for case in LAYERS],
)
def test_layer_matches_dense_reference(mesh, monkeypatch, comm, check_vma, experts, factor):
    """With factor None, no choice is dropped, and an expert has up to several blocks of rows."""
    monkeypatch.setattr(dropless, "BLOCK", 8)
    check_layer(mesh, comm, check_vma, experts, factor, TINY.platform)


def test_layer_with_ragged_dot(mesh):
    """As on GPUs."""
    check_layer(mesh, "jaxcomm", True, 16, None, "gpu")


def check_layer(mesh, comm, check_vma, experts, factor, platform):
    ranks, tokens = 8, 12
    mode = "dropless" if factor is None else "capacity"
    config = dataclasses.replace(TINY, experts=experts, moe=mode, platform=platform)
    graphdef, state = nnx.split(model_lib.MoE(config, nnx.Rngs(0)), nnx.Param)
    params = nnx.to_pure_dict(state)
    specs = {"router": P(), "up": P(AXES), "down": P(AXES)}
    keys = jax.random.split(jax.random.key(1), 2)
    # Experts 0 to 3 get most tokens, and some experts none.
    x = jax.random.normal(keys[0], (ranks * tokens, config.width)) + 2 * params["router"][:, :4].sum(1)
    target = jax.random.normal(keys[1], x.shape)

    def local(params, x, target):
        params = {**params, "router": jax.lax.pcast(params["router"], AXES, to="varying")}

        def objective(params, x):
            y, stats = nnx.merge(graphdef, params)(x, factor, COMMS[comm])
            return (y * target).sum(), (y, stats.dropped[None])

        (grads, dx), (y, dropped) = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
        return y, dropped, dx, lm_step.sum_gradients(grads, specs, AXES, COMMS[comm])

    inputs = (specs, P(AXES), P(AXES))
    outputs = (P(AXES), P(AXES), P(AXES), specs)
    run = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=check_vma)
    y, dropped, dx, grads = jax.jit(run)(params, x, target)

    capacity = model_lib.slots_per_expert(tokens, experts, factor)
    groups = [route_oracle(part @ params["router"], capacity) for part in jnp.split(x, ranks)]
    kept, _, expert = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    assert kept.all() == (factor is None)
    np.testing.assert_allclose(dropped, 1 - kept.reshape(ranks, -1).mean(1), atol=1e-6)
    if factor is None:
        assert np.bincount(expert.ravel(), minlength=experts).max() > 2 * TOP_K * len(x) / experts

    def reference(params, x):
        y = dense_layer(params, x, kept, expert)
        return (y * target).sum(), y

    (expected, expected_dx), expected_y = jax.jit(jax.grad(reference, argnums=(0, 1), has_aux=True))(params, x)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(y, expected_y)
    close(dx, expected_dx)
    for name in params:
        close(grads[name], expected[name], err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("comm", COMMS)
def test_gradients_of_the_model_match_one_device(mesh, comm):
    """The model on 8 ranks against the mean loss of the 8 groups of tokens on one device with all experts."""
    config = dataclasses.replace(TINY, layers=2, moe="capacity", capacity=1.0, batch=16)
    program = step_lib.build(config, mesh, COMMS[comm])
    params, _ = jax.jit(program.init)()
    tokens = jax.random.randint(jax.random.key(2), (config.batch, config.seq + 1), 0, 256)
    loss, grads = program.gradients(params, tokens)

    def reference(params):
        """Mean over all bytes, without losses(), to detect a factor in it that depends on the number of ranks."""
        groups = tokens.reshape(config.ranks(), -1, config.seq + 1)
        model = nnx.merge(program.graphdef, params)
        logits, stats = jax.vmap(lambda group: model(group[:, :-1], capacity_factor=config.capacity))(groups)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), groups[:, :, 1:, None], axis=-1)
        return -picked.mean() + config.balance * stats.balance.mean(), (-picked.mean(), stats.dropped.mean())

    expected, (value, dropped) = jax.jit(jax.grad(reference, has_aux=True))(params)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    assert dropped > 0
    flat = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True)
    for (path, grad), want in flat:
        name = jax.tree_util.keystr(path)
        assert np.abs(want).max() > 0, name
        np.testing.assert_allclose(grad, want, rtol=1e-3, atol=1e-6, err_msg=name)
