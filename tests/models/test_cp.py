"""models/cp: attention on several ranks against attention on one device, order of the positions."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scripts import tiny

from models.cp import parallel as cp
from models.lm import comm as comm_lib
from models.lm import model as lm
from models.lm import train as train_lib

full = pytest.mark.full
WAYS = [
    ("ring", "zigzag", "jaxcomm"),
    ("ring", "striped", "jaxcomm"),
    ("ulysses", "zigzag", "jaxcomm"),
    ("gather", "striped", "jaxcomm"),
    *(pytest.param(*way, marks=full) for way in [("ring", "zigzag", "lax"), ("ulysses", "striped", "jaxcomm"),
                                                 ("ulysses", "zigzag", "lax"), ("gather", "zigzag", "jaxcomm")]),
]  # fmt: skip


@pytest.mark.parametrize(("attention", "order", "comm"), WAYS)
@pytest.mark.parametrize("layout", ["2x4", *(pytest.param(layout, marks=full) for layout in ("1x8", "1x2", "1x1"))])
def test_attention_equals_that_of_one_device(attention, order, comm, layout):
    """Values and gradients in float64, for scores of several orders of magnitude."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        config = tiny("cp", layout=layout, heads=8, seq=32, attention=attention, order=order, comm=comm)
        positions = cp.positions_of(order, config.seq, config.ranks("context"))
        query, key, value, ct = (rng.normal(size=(2, 32, 8, 2)) * scale for scale in (5, 5, 1, 1))
        own = comm_lib.load(config)

        def of_rank(*operands):
            out, pull = jax.vjp(lambda *x: cp.attend(config, *x, positions, own), *operands[:3])
            return out, *pull(operands[3])

        spec = P("data", "context")
        run = jax.shard_map(of_rank, mesh=train_lib.make_mesh(config), in_specs=spec, out_specs=spec)
        places = positions.reshape(-1)
        found = jax.jit(run)(*(x[:, places] for x in (query, key, value, ct)))

        def whole(*operands):
            out, pull = jax.vjp(lm.attend, *operands[:3])
            return out, *pull(operands[3])

        for got, want in zip(found, jax.jit(whole)(query, key, value, ct), strict=True):
            np.testing.assert_allclose(got, want[:, places], rtol=0, atol=1e-11 * np.abs(want).max())


def test_ranks_have_equal_work():
    """Pairs of positions that see each other, in each step of the ring."""
    ranks = 4
    for order, spread in (("zigzag", 0), ("striped", 8)):
        positions = cp.positions_of(order, 32, ranks)
        assert sorted(positions.reshape(-1)) == list(range(32))
        seen = (positions[:, None, :, None] >= positions[None, :, None, :]).sum((2, 3))
        for step in range(ranks):
            work = [seen[rank, (rank - step) % ranks] for rank in range(ranks)]
            assert max(work) - min(work) <= spread
        assert seen[1:, 0].min() == 32 if order == "zigzag" else seen.min() >= 28
