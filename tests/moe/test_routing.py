"""route: places, counts, capacity and errors, against loops of NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import OURS, assert_same, on_ranks, run, value
from jax.sharding import AxisType
from oracle import KINDS, ids_of

from jaxcomm.moe import row_assignment

moe = OURS.moe


def mesh_of(n):
    return jax.make_mesh((n,), ("gpu",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))


def fields(ids, experts, **options):
    """Arrays of the routing, by name."""
    r = moe.route(ids, "gpu", num_experts=experts, **options)
    return {name: getattr(r, name) for name in FIELDS}


def routed(mesh, ids, experts, **options):
    return run(lambda ids: fields(ids, experts, **options), mesh, ids)


FIELDS = ("slot", "expert", "group_sizes", "group_counts", "demand", "dropped", "table")


def check(got, ids, experts, *, drop=False, align=1, slots=None, capacity=None):
    slot, kept, _ = oracle.route(ids, experts, capacity=capacity, align=align, slots=slots, drop=drop)
    n, local = len(ids), experts // len(ids)
    wanted = oracle.counts_of(ids, experts)
    counts, whole = kept.sum(0).reshape(n, local), wanted.sum(0).reshape(n, local)
    sizes = np.full_like(counts, slots) if slots else oracle.aligned(counts, align)
    want = {
        "slot": slot,
        "expert": np.where(slot >= 0, ids, -1),
        "group_sizes": sizes,
        "group_counts": counts,
        "demand": oracle.aligned(whole, align).sum(1),
        "dropped": (ids >= 0).sum((1, 2)) - (slot >= 0).sum((1, 2)),
        "table": np.stack([kept] * n),
    }
    assert_same(got, {name: v.astype(np.int32) for name, v in want.items()})


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full), 3, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.usefixtures("both_assignments")
def test_places(rng, n):
    """One compiled program for all kinds of routings, so that nothing of an earlier one may remain."""
    mesh = mesh_of(n)
    for tokens, choices, experts in ((7, 3, 2 * n), (1, 1, n), (5, 2, 16 * n), (0, 2, n)):
        room = n * tokens * choices
        program = jax.jit(on_ranks(functools.partial(fields, experts=experts, capacity=room), mesh))
        for kind in KINDS:
            ids = ids_of(kind, rng, n, tokens, choices, experts)
            check(value(program(ids)), ids, experts, capacity=room)


@pytest.mark.parametrize("options", [{"align": 8}, {"align": 128}, {"slots": 40}], ids=str)
@pytest.mark.usefixtures("both_assignments")
def test_alignment_and_slots(line, rng, options):
    ids = ids_of("holes", rng, 8, 9, 4, 16)
    check(routed(line, ids, 16, **options), ids, 16, **options)


def test_choices_are_sorted_also_if_numbers_of_pairs_exceed_32_bits():
    for experts in (7, 2**30):
        keys = jnp.array([experts - 1, 5, experts - 1, 0, 5], jnp.int32)
        assert row_assignment._stable_order(keys, experts).tolist() == [3, 1, 4, 0, 2]


TYPES = [("uint8", 256), ("int8", 200), ("uint32", 16), ("int8", 16), ("int64", 16)]


@pytest.mark.parametrize(("dtype", "experts"), TYPES)
def test_types_of_ids(line, rng, dtype, experts):
    """Also types that do not hold the number of experts. test_options_of_layers.py has axes in other orders."""
    ids = rng.integers(0, min(experts, np.iinfo(dtype).max + 1), (8, 5, 3))
    if np.iinfo(dtype).min < 0:
        ids[rng.random(ids.shape) < 0.3] = -1
    with jax.enable_x64(dtype == "int64"):
        check(routed(line, ids.astype(dtype), experts), ids, experts)


@pytest.mark.parametrize(
    "kind", ["uniform", *(pytest.param(k, marks=pytest.mark.full) for k in ("one expert", "one rank", "holes"))]
)
@pytest.mark.usefixtures("both_assignments")
def test_drop(line, rng, kind):
    """Every quota from nothing to everything."""
    ids = ids_of(kind, rng, 8, 6, 3, 16)
    demand = oracle.counts_of(ids, 16).sum(0).reshape(8, 2).sum(1)
    for capacity, align in ((0, 1), (9, 1), (21, 4), (int(demand.max()) - 1, 1)):
        options = {"capacity": capacity, "align": align}
        check(routed(line, ids, 16, on_overflow="drop", **options), ids, 16, drop=True, **options)
    check(routed(line, ids, 16, on_overflow="drop", slots=5), ids, 16, drop=True, slots=5)


def raises(mesh, message, ids, experts, **options):
    body = lambda ids: moe.route(ids, "gpu", num_experts=experts, **options).slot  # noqa: E731
    program = jax.jit(on_ranks(body, mesh))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)) as caught:
        jax.block_until_ready(program(ids))
    assert "jaxcomm: moe.route at test_routing.py" in str(caught.value)
    return program


def test_overflow_is_an_error_on_all_ranks(line):
    ids = np.tile(np.arange(16, dtype=np.int32).reshape(1, 8, 2), (8, 1, 1))  # each expert gets 8 rows
    fits = {"capacity": 16}
    check(routed(line, ids, 16, **fits), ids, 16, **fits)
    more = ids.copy()
    more[3, 5, 1] = 4
    program = raises(line, "rank 2 gets 17 rows, but capacity is 16; pass a larger capacity", more, 16, **fits)
    assert value(program(ids)).shape == (8, 8, 2)  # the next call works
    raises(line, "rank 2 gets 24 rows, but capacity is 16;", more, 16, align=8, capacity=16)
    raises(line, "expert 4 of rank 2 gets 9 rows, but slots is 8; pass more slots", more, 16, slots=8)


def test_unknown_experts_are_an_error_on_all_ranks(line, rng):
    ids = ids_of("uniform", rng, 8, 4, 2, 16)
    ids[6, 3, 1] = 16
    ids[7, :, 0] = 2**31 - 1
    for overflow in ("raise", "drop"):
        raises(
            line, "rank 6 has 1 expert ids that are not below num_experts=16", ids, 16, on_overflow=overflow, slots=99
        )


def test_ids_that_int32_does_not_hold_are_unknown(line):
    ids = np.zeros((8, 4, 2), np.uint32)
    ids[5, 1, 1], ids[7, 0, 0] = 2**31 + 1, 2**32 - 1
    for overflow in ("raise", "drop"):
        raises(line, "rank 5 has 1 expert ids that are not below num_experts=16", ids, 16, on_overflow=overflow)
    with jax.enable_x64(True):
        wide = np.zeros((8, 4, 2), np.int64)
        wide[5, 1, 1] = 2**32
        raises(line, "rank 5 has 1 expert ids that are not below num_experts=16", wide, 16)
        below = np.where(wide > 0, -wide, wide)
        got = routed(line, below, 16)
        assert got["slot"][5, 1, 1] == -1 and (got["slot"] >= 0).sum() == 63


def test_ranks_outside_of_the_group_are_released(mesh, rng):
    """An overflow in one group ends the run on all ranks, also on those that wait for it in a later collective."""
    ids = ids_of("uniform", rng, 8, 4, 2, 4)
    ids[5] = 99

    def body(ids):
        slot = moe.route(ids, "gpu", num_experts=4).slot
        return OURS.psum(slot, ("node", "gpu"))

    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 5 has 8 expert ids"):
        run(body, mesh, ids)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts": 12}, ValueError, "num_experts=12 must be a multiple of the 8 ranks"),
        ({"num_experts": 0}, ValueError, "num_experts must be positive, got 0"),
        ({"expert_ids": jnp.zeros((4, 2))}, TypeError, "expert_ids must have integers, got element type float32"),
        ({"expert_ids": jnp.zeros(4, int)}, ValueError, "expert_ids must have shape .tokens, choices., got .4,."),
        ({"on_overflow": "clip"}, ValueError, "on_overflow must be one of raise, drop, got 'clip'"),
        ({"reduce": "rank"}, ValueError, "reduce must be one of node, home, got 'rank'"),
        ({"slots": 3, "capacity": 6}, ValueError, "slots cannot be combined with capacity or align"),
        ({"slots": 0}, ValueError, "slots must be positive, got 0"),
        ({"align": 0}, ValueError, "align must be positive, got 0"),
        ({"capacity": -1}, ValueError, "capacity must not be negative, got -1"),
        ({"axis_name": "x"}, NameError, "axis_name 'x' is not bound here"),
    ],
    ids=str,
)
def test_wrong_arguments(line, options, error, message):
    given = {"expert_ids": jnp.zeros((4, 2), int), "axis_name": "gpu", "num_experts": 16, **options}
    with pytest.raises(error, match=f"moe.route: {message}"):
        run(lambda _: moe.route(**given).slot, line, np.zeros((8, 1)))


def test_ids_sharded_over_an_explicit_axis_are_refused():
    mesh = jax.make_mesh((4, 2), ("gpu", "y"), axis_types=(AxisType.Explicit,) * 2)
    call = lambda ids: moe.route(ids, "gpu", num_experts=8).slot  # noqa: E731
    with jax.set_mesh(mesh):
        ids = jax.device_put(np.zeros((16, 2), np.int32), jax.P(("gpu", "y")))
        f = jax.shard_map(call, in_specs=jax.P("gpu"), out_specs=jax.P("gpu"), axis_names={"gpu"})
        with pytest.raises(ValueError, match=r"moe.route at test_routing.py.*sharded over explicit mesh axes .*'y'"):
            jax.jit(f).lower(ids)


def test_ids_of_vmap_are_refused(line):
    ids = np.zeros((8, 2, 3, 1), int)
    with pytest.raises(NotImplementedError, match=r"moe.route at test_routing.py.*expert_ids have a dimension of vmap"):
        run(jax.vmap(lambda i: moe.route(i, "gpu", num_experts=8).slot), line, ids)
    with pytest.raises(NotImplementedError, match=r"moe.route_and_dispatch: expert_ids have a dimension of vmap"):
        run(jax.vmap(lambda i: moe.route_and_dispatch(i, i, "gpu", num_experts=8)[0]), line, ids)
