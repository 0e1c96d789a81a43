"""models/tp: the vocabulary in parts, and the collectives of a step."""

import jax
import numpy as np
import optax
import pytest
import scripts
from jax.sharding import PartitionSpec as P
from scripts import tiny

from models.lm import comm as comm_lib
from models.lm import train as train_lib
from models.tp import parallel as tp


def on_ranks(f, config, specs, out_specs):
    mesh = train_lib.make_mesh(config)
    comm = comm_lib.load(config)
    return jax.jit(jax.shard_map(lambda *xs: f(*xs, comm), mesh=mesh, in_specs=specs, out_specs=out_specs))


@pytest.mark.parametrize("comm", ["jaxcomm", pytest.param("lax", marks=pytest.mark.full)])
def test_cross_entropy_without_a_gather(comm):
    """Scores that overflow unless the largest of all ranks is subtracted, and targets of all ranks."""
    rng = np.random.default_rng(3)
    scores = (100 * rng.normal(size=(2, 16, 32))).astype(np.float32)
    targets = np.arange(32, dtype=np.int32).reshape(2, 16)
    config = tiny("tp", layout="1x8", heads=8, comm=comm)
    found = on_ranks(tp.cross_entropy, config, (P(None, None, "tensor"), P()), P())(scores, targets)
    wanted = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_collectives_of_a_step():
    """Per layer: 2 gathers and 2 scatters forward, as many backward, and 2 gathers for the gradients of weights."""
    config = tiny("tp", layers=3, matmul="unfused")
    layers = config.layers
    assert scripts.collectives_of_a_step(config) == {
        "all_gather": (2 + 2 + 2) * layers + 3,  # head forward and its weights, embedding backward
        "reduce_scatter": (2 + 2) * layers + 2,  # embedding forward, head backward
        # Largest score, sum and target; gradients over data and over all ranks; norm; loss.
        "all_reduce": 2 + 2 + 1 + 1,
    }


def test_an_axis_of_size_1_has_no_collective():
    assert scripts.collectives_of_a_step(tiny("tp", layout="1x1")) == {}


def test_ring_sends_blocks():
    config = tiny("tp", matmul="ring")
    found = scripts.collectives_of_a_step(config)
    assert set(found) == {"permute", "all_reduce", "reduce_scatter", "all_gather"}
    assert (found["reduce_scatter"], found["all_gather"]) == (1, 1)  # embedding
    assert found["permute"] == 3 * (10 * config.layers + 3)
