"""Derivatives and other transformations of collective matmul, against one device and jax.lax; collectives in HLO."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_same, run, value
from jax import lax
from jax.sharding import PartitionSpec as P
from products import (
    collectives,
    gathers,
    lax_gathers,
    lax_scatters,
    line_of,
    normal,
    scatters,
    square_loss,
    transfers,
)

N, M, K, F = 3, 2, 6, 3
NAMES = ("unfused", "ring")


def operands(rng):
    """x, w of a gather and of a scatter; one row per rank."""
    return normal(rng, N, M, K), normal(rng, N, K, F), normal(rng, N, N * M, K), normal(rng, N, K, F)


def pair(algorithm, **options):
    """(gather, scatter); those of jax.lax if the algorithm is "lax"."""
    if algorithm == "lax":
        return lax_gathers, lax_scatters
    return gathers(algorithm=algorithm, **options), scatters(algorithm=algorithm, **options)


def against_lax(program, rng, *names, rtol=2e-5):
    """Runs program(gather, scatter, x, w, y, u) with each algorithm and with jax.lax."""
    sides = [pair(name) for name in names or NAMES]

    def body(*xs):
        return [program(*side, *xs) for side in (pair("lax"), *sides)]

    want, *got = run(body, line_of(N), *operands(rng))
    for result in got:
        assert_same(result, want, rtol=rtol)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)], ids=["vma", "no_vma"])
def test_gradients_are_those_of_one_device(rng, check_vma):
    """A column-parallel and a row-parallel layer: the gradients of all operands are those of the whole model."""
    x, w, v = normal(rng, N * M, K), normal(rng, K, N * F), normal(rng, N * F, K)

    def whole(x, w, v):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ v))

    want = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(x, w, v)
    specs = (P("i"), P(None, "i"), P("i"))

    def body(x, w, v):
        def layer(gather, scatter):
            return lambda x, w, v: jnp.sum(jnp.sin(scatter(jnp.tanh(gather(x, w)), v)))

        sides = [*map(pair, NAMES)]
        found = [jax.value_and_grad(layer(*side), (0, 1, 2))(x, w, v) for side in sides]
        return [(lax.psum(loss, "i"), grads) for loss, grads in found]

    out_specs = [(P(), specs)] * 2
    f = jax.shard_map(body, mesh=line_of(N), in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    for loss, grads in value(jax.jit(f)(x, w, v)):
        assert_same((loss, grads), jax.tree.map(np.asarray, want), rtol=2e-5)


def test_gradients_of_several_weights(rng):
    """Results without cotangent, weights of several sizes, one of them used twice."""

    def program(gather, _, x, w, y, u):
        def loss(x, w, u):
            one, two, _, again = gather(x, (w, u[:, :2], u, w))
            return jnp.sum(jnp.sin(one) + again**2) + jnp.sum(jnp.cos(two))

        return jax.grad(loss, (0, 1, 2))(x, w, u), jax.grad(loss, 1)(x, w, u)

    against_lax(program, rng, "ring")


def test_higher_and_forward_derivatives(rng):
    def program(gather, scatter, x, w, y, u):
        found = []
        for f, a, b in ((gather, x, w), (scatter, y, u)):
            da, db = jnp.cos(a), jnp.sin(b)
            found.append(jax.jvp(f, (a, b), (da, db)))
            found.append(jax.jvp(lambda a, f=f, b=b: f(a, b), (a,), (da,)))
            grad = jax.grad(square_loss(f), (0, 1))
            found.append(jax.jvp(grad, (a, b), (da, db)))
            found.append(jax.grad(square_loss(grad), (0, 1))(a, b))
            _, transpose = jax.vjp(lambda da, db, f=f, a=a, b=b: jax.jvp(f, (a, b), (da, db))[1], da, db)
            found.append(transpose(f(a, b)))
        return found

    against_lax(program, rng, "ring", rtol=1e-4)


def stack(x, at=0):
    return jnp.stack([x, 2 * x, jnp.sin(x)], at)


BATCHES = [(0, None), (None, 0), (0, 0), (1, None), (2, 1)]


@pytest.mark.parametrize("order", ["vmap", "grad of vmap", pytest.param("vmap of grad", marks=pytest.mark.full)])
def test_vmap(rng, order):
    """Either operand batched, or both, at several dimensions; and twice."""

    def program(gather, scatter, x, w, y, u):
        found = []
        for f, a, b in ((gather, x, w), (scatter, y, u)):
            for at in BATCHES if order == "vmap" else BATCHES[:2] + BATCHES[-1:]:
                batch = [z if d is None else stack(z, d) for z, d in zip((a, b), at, strict=True)]
                if order == "vmap":
                    found.append(jax.vmap(f, at, 1)(*batch))
                elif order == "vmap of grad":
                    found.append(jax.vmap(jax.grad(square_loss(f), (0, 1)), at)(*batch))
                else:
                    found.append(jax.grad(square_loss(jax.vmap(f, at)), (0, 1))(*batch))
        if order == "vmap":
            found.append(jax.vmap(jax.vmap(gather, (0, None)), (None, 0))(stack(x), stack(w)))
            found.append(jax.vmap(jax.vmap(scatter, (None, 0)))(stack(y), stack(stack(u))))
            found.append(jax.vmap(lambda s: gather(x * s, (w, w * s)))(jnp.arange(1.0, 4)))
        return found

    against_lax(program, rng, "ring", rtol=1e-4)


def test_vmap_over_an_axis_of_the_group(rng):
    """The axis is one of vmap: no rank is a device."""
    x, w, y, u = operands(rng)

    def both(gather, scatter):
        return lambda x, w, y, u: (gather(x, w), scatter(y, u), jax.grad(square_loss(gather), (0, 1))(x, w))

    for name in ("ring", None):
        got, want = (jax.vmap(both(*pair(a)), axis_name="i")(x, w, y, u) for a in (name, "lax"))
        assert_same(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=2e-5)
    got = jax.vmap(gathers(), (0, None), axis_name="i")(x, w[0])
    assert_same(np.asarray(got), np.stack([x.reshape(N * M, K) @ w[0]] * N), rtol=2e-5)


def test_the_ring_sends_to_one_rank(rng):
    x, w, y, u = operands(rng)
    ring = tuple((r - 1) % N for r in range(N))
    for f, xs, block in ((gathers, (x, w), (M, K)), (scatters, (y, u), (M, F))):
        assert transfers(f(algorithm="ring"), line_of(N), *xs) == [(ring, block)] * (N - 1)
    batched = jax.vmap(gathers(algorithm="ring"), (None, 0))  # x is sent once for all weights
    assert transfers(batched, line_of(N), x, stack(w, 1)) == [(ring, (M, K))] * (N - 1)


def total(*rows):
    return {name: sum(row.get(name, 0) for row in rows) for row in rows for name in row}


@pytest.mark.parametrize(
    ("options", "gathered", "scattered"),
    [
        ({"algorithm": "ring"}, {"permute": N - 1}, {"permute": N - 1}),
        ({"algorithm": "unfused"}, {"all_gather": 1}, {"reduce_scatter": 1}),
        ({"algorithm": None}, {"all_gather": 1}, {"reduce_scatter": 1}),
        ({"algorithm": "xla"}, {"xla all_gather": 1}, {"xla reduce_scatter": 1}),
    ],
    ids=["ring", "unfused", "None", "xla"],
)
def test_collectives_of_programs(rng, options, gathered, scattered):
    """Exactly these calls: none twice, none for a gradient that is not asked for, and no others.

    The gradients of a gather send one block per rank for x and one for w. Those of a scatter share their transfers.
    """
    x, w, y, u = operands(rng)
    gather, scatter = gathers(**options), scatters(**options)

    def several(x, w):
        return gather(x, (w, 2 * w))

    cases = [
        (gather, (x, w), gathered),
        (several, (x, w), gathered),
        (jax.grad(square_loss(gather), (0, 1)), (x, w), total(gathered, scattered, gathered)),
        (jax.grad(square_loss(several), (0, 1)), (x, w), total(gathered, scattered, gathered)),
        (jax.grad(square_loss(gather), 0), (x, w), total(gathered, scattered)),
        (jax.grad(square_loss(gather), 1), (x, w), total(gathered, gathered)),
        (scatter, (y, u), scattered),
        (jax.grad(square_loss(scatter), (0, 1)), (y, u), total(scattered, gathered)),
        (jax.grad(square_loss(jax.vmap(scatter)), (0, 1)), (stack(y, 1), stack(u, 1)), total(scattered, gathered)),
    ]
    for f, xs, want in cases:
        assert collectives(f, line_of(N), *xs) == want
