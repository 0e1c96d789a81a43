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


@pytest.mark.parametrize("comm", ["jaxcomm", pytest.param("lax", marks=pytest.mark.full)])
def test_cross_entropy_without_a_gather(comm):
    """Scores that overflow unless the largest of all ranks is subtracted, and targets of all ranks."""
    rng = np.random.default_rng(3)
    scores = (100 * rng.normal(size=(2, 16, 32))).astype(np.float32)
    targets = np.arange(32, dtype=np.int32).reshape(2, 16)
    config = tiny("tp", layout="1x8", heads=8, comm=comm)
    mesh, own = train_lib.make_mesh(config), comm_lib.load(config)
    specs = (P(None, None, "tensor"), P())
    run = jax.shard_map(lambda *xs: tp.cross_entropy(*xs, own), mesh=mesh, in_specs=specs, out_specs=P())
    found = jax.jit(run)(scores, targets)
    wanted = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
