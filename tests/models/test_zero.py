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
    0: {"all_reduce": 3},  # embedding, all layers, scores
    1: {"all_gather": 3, "reduce_scatter": 3},
    2: {"all_gather": 3, "reduce_scatter": 3},  # the loop over layers has one
    # Gathers: embedding, scores, first layer, both loops over layers, before the second loop. Sums: embedding, scores,
    # loop, last two layers. The transfers of layers are started.
    3: {"all_gather": 6, "reduce_scatter": 5, "done": 7},
}


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_of_a_step(stage):
    config = tiny("zero", stage=stage, layers=3)
    program = scripts.program(config)
    wanted = dict(COLLECTIVES[stage])
    wanted["all_reduce"] = wanted.get("all_reduce", 0) + 2
    state = jax.eval_shape(program.init)
    assert scripts.collectives(program.step, state, scripts.tokens(config)) == wanted


# Bytes per rank of `size` parameters in float32. Stage 2 also holds the gradient of one layer. Stage 3 holds gradients
# and parameters of two layers, because transfers run beside computations, and the matrices of one.
MEMORY = {
    1: lambda size, layer: 8 * size + 12 * size / 8,
    2: lambda size, layer: 4 * size + 16 * size / 8 + 4 * layer,
    3: lambda size, layer: 16 * size / 8 + 20 * layer,
}


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
def test_memory_of_a_rank(stage):
    config = tiny("zero", stage=stage, layers=8, width=128, heads=4, hidden=384)
    program = scripts.program(config)
    state = jax.eval_shape(program.init)
    memory = program.step.lower(state, scripts.tokens(config)).compile().memory_analysis()
    size = sum(x.size for x in jax.tree.leaves(state[0]))
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    wanted = MEMORY[stage](size, state[0]["blocks"].shape[1])
    assert 0.8 * wanted < peak < 1.2 * wanted


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
