"""Derivatives and other transformations of collective matmul, against one device and jax.lax; what programs run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_same, run
from jax.sharding import PartitionSpec as P
from products import collectives, gathers, lax_gathers, lax_scatters, line_of, normal, scatters, square_loss, transfers

from jaxcomm._core import plan
from jaxcomm._processes import placement

N, M, K, F = 3, 2, 6, 3


def operands(rng):
    """x, w of a gather and of a scatter; one row per rank."""
    return normal(rng, N, M, K), normal(rng, N, K, F), normal(rng, N, N * M, K), normal(rng, N, K, F)


def against_lax(program, rng, rtol=2e-5):
    """Runs program(gather, scatter, x, w, y, u) with the ring and with jax.lax."""

    def body(*xs):
        return program(gathers(algorithm="ring"), scatters(algorithm="ring"), *xs), program(
            lax_gathers, lax_scatters, *xs
        )

    assert_same(*run(body, line_of(N), *operands(rng)), rtol=rtol)


def test_gradients_of_several_weights(rng):
    """Results without cotangent, weights of several sizes, one of them used twice."""

    def program(gather, _, x, w, y, u):
        def loss(x, w, u):
            one, two, _, again = gather(x, (w, u[:, :2], u, w))
            return jnp.sum(jnp.sin(one) + again**2) + jnp.sum(jnp.cos(two))

        return jax.grad(loss, (0, 1, 2))(x, w, u), jax.grad(loss, 1)(x, w, u)

    against_lax(program, rng)


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

    against_lax(program, rng, rtol=1e-4)


def stack(x, at=0):
    return jnp.stack([x, 2 * x, jnp.sin(x)], at)


def test_vmap_twice(rng):
    def program(gather, scatter, x, w, y, u):
        return (
            jax.vmap(jax.vmap(gather, (0, None)), (None, 0))(stack(x), stack(w)),
            jax.vmap(jax.vmap(scatter, (None, 0)))(stack(y), stack(stack(u))),
            jax.vmap(jax.vmap(gather), (0, None))(stack(stack(x)), stack(w)),
            jax.vmap(jax.vmap(scatter), (0, None))(stack(stack(y)), stack(u)),
            jax.vmap(lambda s: (gather(x * s, (w, w * s)), gather(x, (w, w * s))))(jnp.arange(1.0, 4)),
            jax.vmap(lambda a: jax.vjp(lambda w: gather(a, w), w)[1](y @ u))(stack(x)),  # of one cotangent
        )

    against_lax(program, rng, rtol=1e-4)


def test_vmap_over_an_axis_of_the_group(rng):
    """The axis is one of vmap: no rank is a device."""
    x, w, y, u = operands(rng)

    def both(gather, scatter):
        f = lambda x, w, y, u: (gather(x, w), scatter(y, u), jax.grad(square_loss(gather), (0, 1))(x, w))  # noqa: E731
        moved = x, np.moveaxis(w, 0, 1), np.moveaxis(y, 0, 2), u
        return jax.tree.map(np.asarray, jax.vmap(f, (0, 1, -1, 0), axis_name="i")(*moved))

    for name in ("ring", None):
        assert_same(both(gathers(algorithm=name), scatters(algorithm=name)), both(lax_gathers, lax_scatters), rtol=2e-5)
    got = jax.vmap(gathers(), (0, None), axis_name="i")(x, w[0])
    assert_same(np.asarray(got), np.stack([x.reshape(N * M, K) @ w[0]] * N), rtol=2e-5)


def test_rows_and_weights_vary_over_different_axes(rng):
    """As on a mesh of data and tensor parallelism, in one program with its gradient, against one device."""
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def loss(f, x, w):
        several = f(gathers(algorithm="ring"), (P("i"), P(None, "j")), x, w)  # the same on all ranks of i
        summed = f(scatters(algorithm="ring"), (P(None, "i"), P("i", "j")), x, w)
        return jnp.sum(jnp.sin(several[: len(x)]) + jnp.cos(summed))

    def ours(call, specs, x, w):
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("i", "j"))(x, w)

    both = [jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1))) for f in (ours, lambda _, __, x, w: x @ w)]
    x, w = normal(rng, 4, K), normal(rng, K, 8)
    assert_same(*(jax.tree.map(np.asarray, f(x, w)) for f in both), rtol=2e-5)


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


@pytest.mark.parametrize("platform", ["cpu", "cuda", "other"])
@pytest.mark.parametrize("scope", ["process", "node", "network"])
@pytest.mark.parametrize("product", ["rows", "sums", "scatter"])
@pytest.mark.parametrize("size", [0, (128 << 10) - 1, 128 << 10, 1 << 30])
def test_the_ring_is_chosen_where_it_was_measured(platform, scope, product, size):
    measured = (platform, scope, product) == ("cpu", "node", "rows") and size >= 128 << 10
    found = plan.resolve_collective_matmul(product, size, plan.Placement(scope), plan.Capabilities(platform))
    assert found == ("ring" if measured else "unfused")


def test_what_a_program_of_two_processes_runs(monkeypatch):
    """Each product of a program and of its derivatives is chosen on its own. The program is lowered, not run."""
    mesh, ring = line_of(4), {"permute": 3}
    x, w, ct = (np.zeros((4, *shape), np.float32) for shape in ((1024, 32), (32, 32), (4096, 32)))
    assert collectives(gathers(), mesh, x, w) == {"all_gather": 1}  # of one process
    of_groups = lambda mesh, rows: placement.GroupPlacement((rows % 2).reshape(-1), None)  # noqa: E731
    monkeypatch.setattr(placement, "of_groups", of_groups)
    assert collectives(gathers(), mesh, x, w) == ring
    assert collectives(gathers(), mesh, x[:, :1023], w) == {"all_gather": 1}
    assert collectives(gathers(algorithm="unfused"), mesh, x, w) == {"all_gather": 1}
    assert collectives(scatters(), mesh, ct, w) == {"reduce_scatter": 1}

    def of_operand(f, i):
        """The derivative for one of the operands, without the product itself."""

        def transpose(ct, *operands):
            moving = lambda y: f(*operands[:i], y, *operands[i + 1 :])  # noqa: E731
            return jax.vjp(moving, operands[i])[1](ct)[0]

        return transpose

    assert collectives(of_operand(gathers(), 0), mesh, ct, x, w) == {"reduce_scatter": 1}
    assert collectives(of_operand(gathers(), 1), mesh, ct, x, w) == {"all_gather": 1}
    assert collectives(of_operand(scatters(), 0), mesh, x, ct, w) == ring
    assert collectives(of_operand(scatters(), 1), mesh, x, ct, w) == {"all_gather": 1}
