"""The layers of models/moe: routing and experts against plain oracles, gradients against one device.

Guards against silent errors of a distributed mixture of experts: gradients scaled by the number of ranks, tokens
returned to the wrong place, the wrong token dropped.
"""

import dataclasses
import functools

import jax
import numpy as np
import plain
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from training import TINY

import jaxcomm
from models.lm import comm as comm_lib
from models.lm import step as lm_step
from models.moe import dropless
from models.moe import model as model_lib
from models.moe.model import AXES, TOP_K

COMMS = {"jaxcomm": jaxcomm, "lax": comm_lib.with_synchronous_starts(jax.lax)}


# test_moe_step.py has other libraries and types. "gpu" has products by ragged_dot.
@pytest.mark.parametrize(
    ("comm", "experts", "factor", "platform"),
    [
        ("jaxcomm", 16, None, "cpu"),
        ("jaxcomm", 16, None, "gpu"),
        ("jaxcomm", 16, 0.75, "cpu"),
        *(pytest.param("lax", experts, factor, "cpu", marks=pytest.mark.full)
          for experts, factor in ((8, None), (16, None), (16, 0.75), (8, 1.0))),
    ],
)  # fmt: skip
def test_layer_matches_dense_reference(mesh, monkeypatch, comm, experts, factor, platform):
    """Every expert on every token. With factor None, no choice is dropped, and an expert has up to several blocks."""
    monkeypatch.setattr(dropless, "BLOCK", 8)
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
    run = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs)
    y, dropped, dx, grads = jax.jit(run)(params, x, target)

    def reference(params, x):
        groups = x.reshape(ranks, tokens, -1)
        y, _, dropped = jax.vmap(lambda own: plain.experts(params, own, factor))(groups)
        return (y.reshape(x.shape) * target).sum(), (y.reshape(x.shape), dropped)

    (expected, expected_dx), (expected_y, expected_dropped) = jax.jit(
        jax.grad(reference, argnums=(0, 1), has_aux=True)
    )(params, x)
    assert (expected_dropped > 1e-6).any() == (factor is not None)
    np.testing.assert_allclose(dropped, expected_dropped, atol=1e-6)
    if factor is None:
        expert = np.argsort(-x @ params["router"], axis=1)[:, :TOP_K]
        assert np.bincount(expert.ravel(), minlength=experts).max() > 2 * TOP_K * len(x) / experts
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(y, expected_y)
    close(dx, expected_dx)
    for name in params:
        close(grads[name], expected[name], err_msg=name)
