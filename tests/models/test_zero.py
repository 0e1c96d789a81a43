"""Stages of models/zero: equal bits, memory, packing, overlap."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts
from jax.sharding import PartitionSpec as P
from scripts import tiny

from models.lm import comm as comm_lib
from models.lm import train as train_lib
from models.zero.parallel import AXES, Packing, prefetched


@pytest.mark.parametrize("comm", ["jaxcomm", pytest.param("lax", marks=pytest.mark.full)])
def test_stages_1_and_2_equal_data_parallelism_in_every_bit(comm):
    """Also when the gradient is clipped: all stages add the squares in the same order."""
    wanted = scripts.train(tiny("zero", stage=0, comm="lax", clip=1.0), 6)
    assert (wanted[1] > 1).any()
    for stage in (1, 2):
        found = scripts.train(tiny("zero", stage=stage, comm=comm, clip=1.0), 6)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


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


# Overlap: in each layer, rank 0 waits until rank 1 computes the layer that follows. Rank 1 gets there only if the
# transfers begin and end while rank 0 computes. XLA:CPU runs short loops in order, and in 0.12 those over small arrays
# too. So a layer has many steps, and vectors are large.


class Layers:
    """A stack of layers y = x + sum of the parameters, whose computations meet as above."""

    def __init__(self, count):
        self.reached = {(way, i): threading.Event() for way in ("forward", "backward") for i in range(-1, count + 1)}
        self.count, self.missed = count, []

    def meet(self, way, rank, vector, x):
        """``vector`` begins with the number of the layer."""
        number = int(vector[0])
        following = number + (1 if way == "forward" else -1)
        if rank == 1:
            self.reached[way, number].set()
        elif 0 <= following < self.count and not self.reached[way, following].wait(10):
            self.missed.append((way, number))
        return x

    def steps(self, way, vector, x):
        rank = jax.lax.axis_index(AXES)
        meet = functools.partial(self.meet, way)
        for step in range(10):
            f = meet if step == 5 else lambda rank, vector, x: x
            x = jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), rank, vector[:1], x)
        return x

    def layer(self):
        @jax.custom_vjp
        def layer(x, vector):
            return self.steps("forward", vector, x) + vector

        def backward(vector, ct):
            ct = self.steps("backward", vector, ct)
            return ct, 2 * ct

        layer.defvjp(lambda x, vector: (layer(x, vector), vector), backward)
        return layer


def test_transfers_of_a_layer_run_beside_another_layer():
    ranks, count, size = 2, 4, 1 << 16
    layers, config = Layers(count), tiny("zero", layout="1x2")
    mesh = train_lib.make_mesh(config)
    parts = np.zeros((count, size), np.float32)
    parts[:, 0] = range(count)

    def body(parts):
        stack = prefetched(layers.layer(), comm_lib.load(config), np.dtype(np.float32))
        y, pull = jax.vjp(lambda parts: stack(jnp.ones(size, jnp.float32), parts), parts)
        return y[None], pull(jnp.ones_like(y))[0]

    of_parts = P(None, AXES)
    f = jax.shard_map(body, mesh=mesh, in_specs=of_parts, out_specs=(P(AXES), of_parts), check_vma=False)
    y, grads = jax.tree.map(np.asarray, jax.jit(f)(parts))
    assert not layers.missed
    np.testing.assert_array_equal(y, np.tile(1 + parts.sum(0), (ranks, 1)))
    np.testing.assert_array_equal(grads, np.full((count, size), 2 * ranks))
