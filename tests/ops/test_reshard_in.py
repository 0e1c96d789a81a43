"""reshard_in. The oracle cuts the global array, filled up with zeros, by NumPy."""

import functools
import math
import random
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resharding
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import RankSharding, reshard_in

N = 8
AXES = ("a", "b")
SIZES = (2, 4)
COLLECTIVES = r"all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|ppermute|psum|all_gather"


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices())[[3, 1, 2, 0, 7, 5, 6, 4]].reshape(SIZES), AXES)


def full(side):
    return side if isinstance(side, RankSharding) else RankSharding(np.arange(N).reshape(SIZES), AXES, side)


def shards(x, side):
    """The arrays of all ranks: (N, ...)."""
    side = full(side)
    names = [
        e if isinstance(e, tuple) else (e,) if e else () for e in (*side.spec, *[None] * (x.ndim - len(side.spec)))
    ]
    size = dict(zip(side.axis_names, side.ranks.shape, strict=True))
    parts = [math.prod(size[a] for a in of) for of in names]
    block = [-(-n // p) for n, p in zip(x.shape, parts, strict=True)]
    padded = np.zeros([p * b for p, b in zip(parts, block, strict=True)], x.dtype)
    padded[tuple(map(slice, x.shape))] = x
    found = np.zeros((N, *block), x.dtype)
    for index, rank in np.ndenumerate(side.ranks):
        where = dict(zip(side.axis_names, index, strict=True))
        cut = padded
        for d, of in enumerate(names):
            part = 0
            for a in of:
                part = part * size[a] + where[a]
            cut = np.split(cut, parts[d], d)[part]
        found[rank] = cut
    return found


def random_side(rng, ndim, partial=True):
    names, ranks = AXES, None
    if partial and rng.random() < 0.6:
        number = rng.choice([1, 2, 3, 4, 6, 8])
        rows = rng.choice([d for d in range(1, number + 1) if number % d == 0])
        names, ranks = ("p", "q"), np.array(rng.sample(range(N), number)).reshape(rows, -1)
    left = rng.sample(names, 2)
    spec = []
    for _ in range(ndim):
        spec.append(tuple(left.pop() for _ in range(rng.randint(0, len(left)))) or None)
    return P(*spec) if ranks is None else RankSharding(ranks, names, P(*spec))


on_ranks = functools.partial(harness.on_ranks, check_vma=False)


def same(*trees):
    got, wanted = (harness.value(t) if isinstance(jax.tree.leaves(t)[0], jax.Array) else t for t in trees)
    harness.assert_same(got, wanted, bits=True)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.full) for s in range(3, 20))])
def test_values_and_the_transpose(mesh, seed):
    """Uneven shards, copies, ranks in any order and without a shard, all kinds of element types, empty arrays.

    For all v: <v, reshard(x)> = <transpose(v), x>, also by the transpose of the transpose. Integers are exact.
    """
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    cases = []
    for i in range(8):
        shape = rng.choice([(), (7,), (8, 16), (5, 9), (3, 1, 10), (0, 6)])
        x = resharding.values(shape, resharding.DTYPES[i % len(resharding.DTYPES)], seed + i)
        cases.append((x, random_side(rng, len(shape)), random_side(rng, len(shape))))
    algorithm = [None, "direct", "xla"][seed % 3]

    def body(xs):
        return [
            reshard_in(x, AXES, source, destination, shape=whole.shape, algorithm=algorithm)
            for x, (whole, source, destination) in zip(xs, cases, strict=True)
        ]

    f = harness.on_ranks(body, mesh, check_vma=seed % 2 == 0)
    held = [shards(x, source) for x, source, _ in cases]
    wanted = [shards(x, destination) for x, _, destination in cases]
    same(jax.jit(f)(held), wanted)

    xs, ys = ([each.real.astype(np.float32) for each in side] for side in (held, wanted))
    vs = [numbers.integers(-4, 4, y.shape).astype(np.float32) for y in ys]

    @jax.jit
    def derivatives(xs, vs):
        pull = jax.vjp(f, xs)[1]
        return pull(vs), jax.jvp(pull, (vs,), (vs,))[1], jax.linear_transpose(pull, vs)((xs,))

    (backs,), (pushed,), (again,) = harness.value(derivatives(xs, vs))
    for x, y, v, back, push, t in zip(xs, ys, vs, backs, pushed, again, strict=True):
        assert np.vdot(v, y) == np.vdot(back, x)
        same(push, back)
        assert np.vdot(v, t) == np.vdot(back, x)


SPECS = [P(), P("a"), P("b", "a"), P(None, ("b", "a"))]


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("source", SPECS, ids=str)
def test_as_jit_with_shardings(mesh, source, check_vma):
    """Values and cotangents are those of an identity whose shardings XLA changes. There is no collective of XLA.

    Types tell that all copies of x get the sum of the cotangents by the same transfer.
    """
    x = jax.device_put(np.arange(128.0, dtype=np.float32).reshape(8, 16), NamedSharding(mesh, source))
    w = np.random.default_rng(0).integers(-8, 8, x.shape).astype(np.float32)

    def ours(x):
        def body(x):
            return [reshard_in(x * x, AXES, source, spec) for spec in SPECS]

        return jax.shard_map(body, mesh=mesh, in_specs=source, out_specs=SPECS, check_vma=check_vma)(x)

    def theirs(x):
        return [jax.lax.with_sharding_constraint(x * x, NamedSharding(mesh, spec)) for spec in SPECS]

    def pulled(f):
        return jax.jit(lambda x, cts: jax.vjp(f, x)[1](cts)[0])

    cts = [jax.device_put(w * (i + 1), NamedSharding(mesh, spec)) for i, spec in enumerate(SPECS)]
    compiled, back = jax.jit(ours).lower(x).compile(), pulled(ours).lower(x, cts).compile()
    for got, wanted, spec in zip(compiled(x), jax.jit(theirs)(x), SPECS, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        same(got, wanted)
    same(back(x, cts), pulled(theirs)(x, cts))
    for program in (compiled, back) if check_vma else (compiled,):
        assert not re.findall(COLLECTIVES, program.as_text())


def test_transformations(mesh):
    """vmap over a dimension and over a mesh axis, loops, checkpoint, and the asynchronous form."""
    x = np.arange(2 * 6 * 8, dtype=np.float32).reshape(2, 6, 8)
    source, destination = P("b"), P(None, "a")
    move = functools.partial(reshard_in, axis_name=AXES, source=source, destination=destination, shape=(6, 8))
    held = np.stack([shards(each, source) for each in x], 2)  # (ranks, rows, copies, columns)
    wanted = np.stack([shards(each, destination) for each in x], 2)

    def body(x):
        mapped = jax.vmap(move, 1, 1)
        pending = jaxcomm.reshard_in_start(x[:, 0], AXES, source, destination, shape=(6, 8))
        beside = jnp.sin(x)
        looped = jax.lax.scan(lambda c, x: (c, jax.checkpoint(move)(x)), 0, jnp.moveaxis(x, 1, 0))[1]
        started = jax.grad(lambda x: jnp.sum(
            jaxcomm.reshard_in_start(x, AXES, source, destination, shape=(6, 8)).done() ** 2
        ))(x[:, 0])  # fmt: skip
        plain = jax.grad(lambda x: jnp.sum(move(x) ** 2))(x[:, 0])
        gradients = jax.vmap(jax.grad(lambda x: jnp.sum(move(x) ** 2)), 1, 1)(x)[:, 0]
        return mapped(x), pending.done(after=beside), looped, (started - plain, gradients - plain)

    mapped, started, looped, zeros = harness.value(jax.jit(on_ranks(body, mesh))(held))
    same([mapped, started, looped], [wanted, wanted[:, :, 0], np.moveaxis(wanted, 2, 1)])
    assert not any(map(np.any, zeros))


def test_cotangents_of_copies_are_rounded_once(mesh):
    """256 + 7 * 1 is 264 in bfloat16. Rounded after each sum, it stays 256."""
    weights = np.array([256, *[1] * 7], jnp.bfloat16)
    f = on_ranks(lambda x, w: jax.grad(lambda x: jnp.sum(reshard_in(x, AXES, P(AXES), P()) * w))(x), mesh)
    same(jax.jit(f)(np.ones((8, 1), jnp.bfloat16), weights), np.full((8, 1), 264, jnp.bfloat16))


def test_an_axis_of_vmap():
    x = np.arange(7 * 4, dtype=np.int32).reshape(7, 4)
    source, destination = RankSharding(np.array([3, 0, 2]), ("r",), P("r")), RankSharding(
        np.array([1, 0]), ("r",), P(None, "r")
    )  # fmt: skip
    rows = np.zeros((4, 3, 4), np.int32)
    for i, rank in enumerate([3, 0, 2]):
        rows[rank, : len(x[3 * i : 3 * i + 3])] = x[3 * i : 3 * i + 3]
    move = functools.partial(reshard_in, axis_name="v", source=source, destination=destination, shape=x.shape)
    got = jax.vmap(move, 1, 2, axis_name="v")(rows.swapaxes(0, 1))
    wanted = np.zeros((4, 7, 2), np.int32)
    wanted[1], wanted[0] = x[:, :2], x[:, 2:]
    np.testing.assert_array_equal(got, np.moveaxis(wanted, 0, 2))
    # The same operand on all ranks: the ranks 2 and 3 have its rows, and every rank gets the whole.
    pair = RankSharding(np.array([2, 3]), ("r",), P("r"))
    got = jax.vmap(lambda _: reshard_in(x[:4], "v", pair, P()), axis_name="v")(rows)
    np.testing.assert_array_equal(got, np.tile(x[:4], (4, 2, 1)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"source": P("z")}, ValueError, r"source must name each axis of \('a', 'b'\) .* got P\('z'"),
        ({"destination": P("a", "a")}, ValueError, "destination must name each axis"),
        ({"destination": P(None, None, "a")}, ValueError, "more entries than an array of 2 dimensions"),
        *(
            ({"source": RankSharding(np.array(ranks), ("r",), P("r"))}, ValueError, "different integers from 0 to 7")
            for ranks in ([0, 8], [-1, 0], [1, 1], [0.0, 1.0])
        ),
        ({"source": RankSharding(np.array([0]), ("r", "s"), P("r"))}, ValueError, r"over ranks of shape \(1,\)"),
        ({"shape": (4.0, 8)}, TypeError, "reshard_in: shape must be an integer, got 4.0"),
        ({"shape": (5, 8)}, ValueError, r"array of shape \(5, 8\) has shape \(3, 8\) by source .* got \(4, 8\)"),
        ({"source": "a"}, TypeError, "source must be a jax.sharding.PartitionSpec or a RankSharding, got 'a'"),
        ({"algorithm": "ring"}, ValueError, "unknown algorithm 'ring'; pass one of direct, hierarchical, xla"),
    ],
)  # fmt: skip
def test_errors(mesh, change, error, message):
    arguments = {"source": P("a"), "destination": P("b"), **change}
    with pytest.raises(error, match=message):
        jax.eval_shape(on_ranks(lambda x: reshard_in(x, AXES, **arguments), mesh), np.zeros((8, 4, 8)))
