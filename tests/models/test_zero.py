"""Stages of models/zero: equal bits, collectives, memory, packing."""

import jax
import numpy as np
import pytest
import scripts
from scripts import tiny

from models.zero.parallel import Packing

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("comm", ["jaxcomm", pytest.param("lax", marks=pytest.mark.full)])
def test_stages_1_and_2_equal_data_parallelism_in_every_bit(comm):
    """Also when the gradient is clipped: all stages add the squares in the same order."""
    wanted = scripts.train(tiny("zero", stage=0, comm="lax", clip=1.0), 6)
    assert (wanted[1] > 1).any()
    for stage in (1, 2):
        found = scripts.train(tiny("zero", stage=stage, comm=comm, clip=1.0), 6)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


COLLECTIVES = {  # without the loss and the norm, which are one psum each
    0: {"all_reduce": 1},
    1: {"all_gather": 3, "reduce_scatter": 3},  # embedding, all layers, scores
    2: {"all_gather": 3, "reduce_scatter": 3},  # the loop over layers has one
    3: {"all_gather": 4, "reduce_scatter": 3},  # the loop over layers has one in each direction
}


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_of_a_step(stage):
    config = tiny("zero", stage=stage)
    program = scripts.program(config)
    wanted = dict(COLLECTIVES[stage])
    wanted["all_reduce"] = wanted.get("all_reduce", 0) + 2
    state = jax.eval_shape(program.init)
    assert scripts.collectives(program.step, state, scripts.tokens(config)) == wanted


def test_memory_of_a_rank():
    """Stage 3: states in parts, and three vectors of a layer: gathered, as matrices, gradient."""
    config = tiny("zero", stage=3, layers=8, width=128, heads=4, hidden=384)
    program = scripts.program(config)
    state = jax.eval_shape(program.init)
    memory = program.step.lower(state, scripts.tokens(config)).compile().memory_analysis()
    size = sum(x.size for x in jax.tree.leaves(state[0]))
    layer = state[0]["blocks"].shape[1]
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert 16 * size / 8 < peak < 1.2 * (16 * size / 8 + 3 * 4 * layer)


def test_a_group_is_packed_with_vectors_first():
    rng = np.random.default_rng(1)
    tree = {"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4), "c": rng.normal(size=(3, 1, 2))}
    packing = Packing(tree, 5)
    vector = np.asarray(packing.pack(tree))
    assert vector.shape == (20,)
    wanted = np.concatenate([tree["b"], tree["a"].reshape(-1), tree["c"].reshape(-1), np.zeros(4)])
    np.testing.assert_array_equal(vector, wanted.astype(vector.dtype))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), packing.unpack(vector), tree)
    assert np.asarray(packing.decays(np.arange(20))).tolist() == [False] * 4 + [True] * 12 + [False] * 4
