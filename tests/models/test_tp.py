"""models/tp: the vocabulary in parts."""

import jax
import numpy as np
import optax
import pytest
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
