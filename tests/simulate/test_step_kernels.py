"""step(): kernels whose work a jaxpr does not show line by line: Pallas and composites."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from steps import run, struct

from jaxcomm.simulate import StepError


def _blocked_product(x, w, block, estimate=None, inner=1):
    """A product in blocks; with `inner`, each block's product runs that many times."""

    def body(x_ref, w_ref, out_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        def once(_, total):
            return total + x_ref[...] @ w_ref[...]

        out_ref[...] += jax.lax.fori_loop(0, inner, once, jnp.zeros_like(out_ref))

    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block,) * 2, lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        cost_estimate=estimate,
    )(x, w)


@pytest.mark.parametrize("inner", [1, 3])
def test_a_pallas_kernel_has_the_work_of_its_blocks(inner):
    """The blocks of a product have 2 M N K operations together; arrays are read and written once."""
    m, k, n = 512, 1024, 256

    def f(x, w):
        return jax.lax.psum(_blocked_product(x, w, 128, inner=inner), "model")

    found = run(f, struct(m, k), struct(k, n), ins=(P(), P()))
    assert found.flops == inner * 2 * m * n * k
    assert found.bytes == 4 * (m * k + k * n + m * n)
    assert any("pallas_call without cost_estimate" in note for note in found.notes)


def test_a_pallas_kernel_has_the_work_that_its_caller_declares():
    estimate = pl.CostEstimate(flops=10**12, transcendentals=0, bytes_accessed=10**9)

    def f(x, w):
        return jax.lax.psum(_blocked_product(x, w, 128, estimate), "model")

    found = run(f, struct(512, 512), struct(512, 512), ins=(P(), P()))
    assert (found.flops, found.bytes) == (1e12, 1e9)
    assert found.compute_s == pytest.approx(1e12 / (0.5 * 0.5e15) + 2e-6)  # float32 at half the peak of bfloat16
    remote = dataclasses.replace(estimate, remote_bytes_transferred=1)
    with pytest.raises(StepError, match=r"pallas_call at .*test_step_kernels.py.* exchanges data with other devices"):
        x = struct(512, 512)
        run(lambda x, w: jax.lax.psum(_blocked_product(x, w, 128, remote), "model"), x, x, ins=(P(), P()))


def test_a_composite_has_the_work_of_its_decomposition():
    def layer(x, w):
        return jax.lax.psum(x @ w, "model")

    found, plain = (
        run(f, struct(512, 1024), struct(1024, 256), ins=(P(), P()))
        for f in (jax.lax.composite(layer, name="test.layer"), layer)
    )
    assert found.flops == plain.flops == 2 * 512 * 1024 * 256
    assert found.time_s == plain.time_s
