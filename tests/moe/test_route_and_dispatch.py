"""route_and_dispatch: places, rows and errors, against loops of NumPy and route()."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import OURS, assert_same, run
from oracle import ids_of
from test_routing import FIELDS, check

moe = OURS.moe


def both(mesh, ids, x, experts, *, algorithm="one_shot", **options):
    """The fields of the routing and the rows of every rank."""

    def body(ids, x):
        rows, r = moe.route_and_dispatch(x, ids, "gpu", num_experts=experts, algorithm=algorithm, **options)
        return {name: getattr(r, name) for name in FIELDS}, rows

    return run(body, mesh, ids, x)


@pytest.mark.parametrize("kind", ["holes", "one rank"])
@pytest.mark.parametrize("options", [{"align": 3}, {"slots": 48}, {"capacity": 48}], ids=str)
def test_routing_and_payloads_of_several_types(line, rng, options, kind):
    ids = ids_of(kind, rng, 8, 3, 2, 16)
    x = {
        "narrow": rng.integers(0, 2, (8, 3, 7)).astype(bool),
        "none": np.zeros((8, 3, 0), np.float32),
        "small": rng.integers(-9, 9, (8, 3, 3)).astype(jnp.bfloat16),
        "wide": rng.standard_normal((8, 3, 2, 3)).astype(np.float32),
    }
    fields, rows = both(line, ids, x, 16, **options)
    check(fields, ids, 16, **options)
    slot, _, capacity = oracle.route(ids, 16, **options)
    assert_same(rows, {name: oracle.dispatch(v, ids, slot, capacity, 16) for name, v in x.items()}, bits=True)


def test_every_rank_reports_an_overflow_and_unknown_experts(line, rng):
    ids = np.zeros((8, 4, 2), np.int32)
    x = np.ones((8, 4, 3), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 0 gets 64 rows, but capacity is 63"):
        both(line, ids, x, 8, capacity=63)
    ids[5, 1, 1] = 8
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 5 has 1 expert ids that are not below num_experts=8"):
        both(line, ids, x, 8)
    ids[5, 1, 1] = 7
    both(line, ids, x, 8, capacity=63)  # the next call works


def test_one_shot_drops_nothing(line):
    with pytest.raises(ValueError, match="needs on_overflow='raise'"):
        both(line, np.zeros((8, 4, 2), np.int32), np.ones((8, 4, 3), np.float32), 8, on_overflow="drop")
