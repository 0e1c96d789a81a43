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


def test_both_libraries_have_the_same_collectives_and_products():
    rng, config = np.random.default_rng(4), tiny("tp", layout="1x4")
    x, w = rng.normal(size=(2, 8, 4)).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32)
    ours, of_lax = (comm_lib.load(tiny("tp", layout="1x4", comm=comm)) for comm in ("jaxcomm", "lax"))
    assert vars(ours).keys() == vars(of_lax).keys() | {"moe"}

    def products(x, w):
        found = []
        for comm in (ours, of_lax):
            rows = comm.all_gather_matmul(x, (w, w @ w), "tensor", axis=1)
            found.append((rows, comm.matmul_psum_scatter(rows[0], w, "tensor", scatter_dimension=1)))
        return jax.tree.map(lambda a, b: abs(a - b).max()[None], *found)

    specs = (P(None, "tensor"), P())
    run = jax.shard_map(products, mesh=train_lib.make_mesh(config), in_specs=specs, out_specs=P("tensor"))
    assert max(map(np.max, jax.tree.leaves(jax.jit(run)(x, w)))) < 1e-5


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
