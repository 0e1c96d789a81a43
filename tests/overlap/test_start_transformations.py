"""Transformations of start and done, against jax.lax."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import assert_same, run
from jax import lax
from pairs import BLOCK

import jaxcomm


def test_no_derivative_through_integers_and_values_to_wait_for(mesh, rng):
    x = rng.standard_normal((8, *BLOCK), np.float32)

    def body(x):
        def f(x, y):
            whole = jaxcomm.psum_start(x.astype(jnp.int32), "gpu", after=x).done(after=x)
            return jnp.sum(jaxcomm.psum_start(x, "gpu", after=y).done(after=(y, whole)))

        return jax.grad(f, (0, 1))(x, x)

    of_x, of_y = run(body, mesh, x, check_vma=False)
    np.testing.assert_array_equal(of_x, np.full_like(x, 4))  # psum is its own transpose
    np.testing.assert_array_equal(of_y, np.zeros_like(x))


def test_pending_in_the_carry_of_a_loop(mesh, rng):
    """A gather of the next layer's weights is started in one iteration and used in the next."""
    weights = rng.standard_normal((8, 5, 2, 4)).astype(np.float32)  # layers; a row of each for each pair of columns
    x = rng.standard_normal((8, 8)).astype(np.float32)

    def body(weights, x):
        def step(carry, following):
            x, pending = carry
            coming = jaxcomm.all_gather_start(following, "gpu", tiled=True, after=x)
            return (jnp.tanh(pending.done(after=x) @ x[:4]).repeat(1), coming), x

        first = jaxcomm.all_gather_start(weights[0], "gpu", tiled=True)
        (x, last), _ = lax.scan(step, (x, first), weights[1:])
        return x, last.done()

    def expected(weights, x):
        whole = lax.all_gather(weights, "gpu", axis=1, tiled=True)
        for layer in range(4):
            x = jnp.tanh(whole[layer] @ x[:4])
        return x, whole[-1]

    assert_same(*run(lambda *xs: [body(*xs), expected(*xs)], mesh, weights, x, check_vma=False), rtol=1e-5)
