"""The training step and the evaluation of models/moe on 8 ranks against the same model on one device (plain.py).

Guards against errors that are equal in all distributed modes: a gradient or a norm that counts a term once per rank,
the wrong capacity, a token that is dropped or returned to the wrong place, a missing part of the loss, an optimiser
that is not AdamW.
"""

import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from training import TINY

import jaxcomm
from models.lm import comm as comm_lib
from models.moe import step as step_lib

COMMS = {"jaxcomm": jaxcomm, "lax": comm_lib.with_synchronous_starts(jax.lax)}
CONFIG = dataclasses.replace(
    TINY, layers=2, experts=16, batch=16, moe="capacity", capacity=1.0, eval_capacity=1.5, balance=0.5,
    weight_decay=0.5, clip=2.0,
)  # fmt: skip


def build(config, mesh, comm, check_vma):
    with mock.patch.object(jax, "shard_map", functools.partial(jax.shard_map, check_vma=check_vma)):
        return step_lib.build(config, mesh, comm)


def some_tokens(seed):
    return jax.random.randint(jax.random.key(seed), (CONFIG.batch, CONFIG.seq + 1), 0, 256)


def close(value, expected, scale=None, name=""):
    """Compares up to rounding, relative to the largest value."""
    expected = np.asarray(expected)
    scale = np.abs(expected).max() if scale is None else scale
    np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-3, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("comm", "check_vma", "moe", "platform"),
    [
        # test_scripts.py has gradients of models/mesh, whose experts are those of "dropless" on CPUs.
        pytest.param("jaxcomm", True, "dropless", "cpu", marks=pytest.mark.full),
        ("jaxcomm", True, "dropless", "gpu"),  # products by ragged_dot
        ("jaxcomm", True, "capacity", "cpu"),
        *(
            pytest.param(*mode, moe, "cpu", marks=pytest.mark.full)
            for mode in [("jaxcomm", False), ("lax", True)]
            for moe in ("dropless", "capacity")
        ),
    ],
)
def test_step_equals_that_of_one_device(mesh, comm, check_vma, moe, platform):
    """Two steps: the gradients of the first step are clipped, those of the second are not."""
    config = dataclasses.replace(CONFIG, moe=moe, platform=platform)
    program = build(config, mesh, COMMS[comm], check_vma)
    grads_of = jax.jit(lambda params, tokens: plain.grads(params, tokens, config))
    state = jax.jit(program.init)()
    adamw = plain.AdamW(CONFIG, jax.tree.leaves(state[0]))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state[0])]
    # In the first batch all bytes are equal: gradients of all ranks have equal signs, and two experts get all tokens.
    for tokens, clipped in ((0 * some_tokens(2) + 65, True), (some_tokens(3), False)):
        wanted, grads = jax.device_get(grads_of(state[0], tokens))
        norm, grads = plain.clip(jax.tree.leaves(grads), CONFIG.clip)
        assert norm > 1.2 * CONFIG.clip if clipped else norm < CONFIG.clip / 1.2
        adamw.params = [np.asarray(x, np.float64) for x in jax.tree.leaves(state[0])]
        adamw.update(grads)
        state, metrics = program.step(state, tokens)
        assert set(metrics) == {"loss", "balance", "dropped", "grad_norm"}
        assert (wanted["dropped"] > 0) == (moe == "capacity")
        for name, value in {**wanted, "grad_norm": norm}.items():
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4), name
        adam = state[1][0]
        results = (jax.tree.leaves(x) for x in (state[0], adam.mu, adam.nu))
        for i, (name, params, mean, square) in enumerate(zip(names, *results, strict=True)):
            assert np.abs(adamw.mean[i]).max() > 0, name
            close(mean, adamw.mean[i], name=name)
            close(square, adamw.square[i], name=name)
            # If a gradient is only rounding error, the direction of its step is arbitrary.
            sure = np.sqrt(adamw.square[i]) > 1e-3 * np.sqrt(adamw.square[i]).max()
            rate = plain.rate(CONFIG, adamw.step - 1)
            close(np.asarray(params)[sure], adamw.params[i][sure], scale=100 * rate, name=name)


def test_evaluation_has_its_own_capacity(mesh):
    program = step_lib.build(CONFIG, mesh, COMMS["jaxcomm"])
    state, tokens = jax.jit(program.init)(), some_tokens(4)
    params = state[0]
    of_one_device = jax.jit(plain.metrics, static_argnums=(2, 3))
    expected = of_one_device(params, tokens, CONFIG, CONFIG.eval_capacity)
    assert 0 < expected["dropped"] < of_one_device(params, tokens, CONFIG, CONFIG.capacity)["dropped"]
    metrics = program.evaluate(state[0], tokens)
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_travel_in_the_type_of_the_activations(mesh, dtype):
    """Two all_to_all per layer, and two for its gradient. Sums over ranks stay float32."""
    config = dataclasses.replace(TINY, dtype=dtype)
    exchanged, summed = [], []

    def all_to_all(x, *args, **options):
        exchanged.append(x.dtype.name)
        return jax.lax.all_to_all(x, *args, **options)

    def psum(x, axes):
        summed.extend(leaf.dtype.name for leaf in jax.tree.leaves(x))
        return jax.lax.psum(x, axes)

    comm = comm_lib.with_synchronous_starts(types.SimpleNamespace(all_to_all=all_to_all, psum=psum))
    program = step_lib.build(config, mesh, comm)
    state = jax.eval_shape(program.init)
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq + 1), jnp.int32)
    new, _ = jax.eval_shape(program.step, state, tokens)
    assert exchanged == [dtype] * 2
    assert set(summed) == {"float32"}
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, state)
