"""models/pp: order of the layers, sums of gradients, memory."""

import jax
import numpy as np
import pytest
import scripts
from flax import nnx
from scripts import tiny

from models.lm import model as lm

full = pytest.mark.full


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("pp", {"schedule": "circular"}),
        pytest.param("pp", {"schedule": "circular", "rounds": 2, "layers": 4}, marks=full),
        pytest.param("pp", {"schedule": "1f1b"}, marks=full),
        pytest.param("mesh", {"layout": "2x1x1x1", "experts": 0}, marks=full),
    ],
)
def test_gradients_of_microbatches_are_added_in_float32(script, options):
    """256 equal microbatches in bfloat16: each gradient has an error of 2 percent. Sums in bfloat16 add 6 percent."""
    count = 256
    options = {"layout": "2x1", "rounds": 1, "dtype": "bfloat16", **options}
    config = tiny(script, **options, microbatches=count, batch=count)
    tokens = np.tile(scripts.tokens(config)[:1], (count, 1))
    graphdef, _, init = lm.structure(config)
    params = jax.jit(init)()
    one_device = jax.grad(lambda params: lm.loss(nnx.merge(graphdef, params), tokens[:1]))  # in float32
    packed = scripts.SCRIPTS[script].arrange(config, params)
    wanted = scripts.SCRIPTS[script].arrange(config, jax.jit(one_device)(params))
    _, found = scripts.program(config).gradients(packed, tokens)
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        assert got.dtype == np.float32
        assert np.linalg.norm(got - want) < 0.04 * np.linalg.norm(want), jax.tree_util.keystr(path)


def temporary(microbatches, **options):
    """Temporary bytes of a step on a rank."""
    options = {"layers": 8, "width": 128, "hidden": 384, "batch": 2 * microbatches, **options}
    config = tiny("pp", microbatches=microbatches, **options)
    program = scripts.program(config)
    state = jax.eval_shape(program.init)
    return program.step.lower(state, scripts.tokens(config)).compile().memory_analysis().temp_size_in_bytes


@full
def test_1f1b_keeps_inputs_by_stages_not_by_microbatches():
    """2 (p - 1) + 1 inputs for any number of microbatches. Circular keeps one per tick, which is one per microbatch."""
    options = {"layers": 4, "hidden": 64, "rounds": 1, "seq": 128}
    one = 4 * 128 * 128  # bytes of the input of a microbatch: one sequence
    grown = temporary(20, **options, schedule="1f1b") - temporary(8, **options, schedule="1f1b")
    assert grown < one
    circular = temporary(20, **options) - temporary(8, **options)
    assert circular > 12 * one
