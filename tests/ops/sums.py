"""Tests that psum, pmean and psum_scatter share: precision, overflow, and equal bits in every execution."""

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import OURS, assert_same, run

DTYPES = tuple(name for name in collective.ALL_DTYPES if name != "bool")
RUNS = ["bfloat16", "float32", *(pytest.param(name, marks=pytest.mark.full) for name in ("float16", "float8_e4m3fn"))]


class Sums:
    rounds = True

    def elements(self, rng, shape, name):
        """Sums of 8 values are exact in f32; 16 bits or less show the single rounding. Integers wrap around."""
        dtype = jnp.dtype(name)
        if name == "bool" or name in collective.INTEGERS:
            return collective.any_bits(rng, shape, name)
        if name == "float8_e8m0fnu":  # powers of two only
            return np.exp2(rng.integers(-3, 4, shape).astype(np.float32)).astype(dtype)
        steps = 2 ** min(8, jnp.finfo(dtype).nmant + 1)
        values = rng.integers(-steps, steps, shape).astype(np.float32) / (steps // 2)
        return values.astype(dtype) * dtype.type(1 + 1j if dtype.kind == "c" else 1)

    @pytest.mark.parametrize("name", RUNS)
    def test_same_bits_on_all_ranks_in_every_run_and_program(self, mesh, rng, name):
        """Sums of random floats depend on the order. The plan determines it, not the order of arrival."""
        x = rng.standard_normal((8, 8 * 1031)).astype(jnp.dtype(name))
        names = collective.fitting(self.op, collective.MESH, ("node", "gpu"))

        def body(x):
            return {a: self.call(OURS, x, ("node", "gpu"), algorithm=a) for a in names}

        first = run(body, mesh, x)
        if self.op != "psum_scatter":
            assert_same(first, {a: np.stack([rows[0]] * 8) for a, rows in first.items()}, bits=True)
        again = run(lambda x: jax.lax.scan(lambda x, _: (x, body(x)), x, None, length=8)[1], mesh, x)
        for step in range(8):
            assert_same(jax.tree.map(lambda y, step=step: y[:, step], again), first, bits=True)

    def test_small_floats_round_once_per_step_at_most(self, mesh, rng):
        """Every algorithm. Algorithms of several steps forward rounded partial sums."""
        for name in ("bfloat16", "float16"):
            x = rng.standard_normal((8, 8 * 1031)).astype(jnp.dtype(name))
            exact = self.oracle(x.astype(np.float64), mesh.shape, ("node", "gpu"))
            names = collective.fitting(self.op, collective.MESH, ("node", "gpu"))
            got = run(lambda x, names=names: [self.call(OURS, x, ("node", "gpu"), algorithm=a) for a in names], mesh, x)
            bound = 2.0 ** -(jnp.finfo(x.dtype).nmant + 1) * np.abs(x.astype(np.float32)).sum(0).max()
            for algorithm, result in zip(names, got, strict=True):
                error = np.abs(result.astype(np.float64) - exact).max()
                assert error <= bound * (1 if algorithm == "direct" else 7), algorithm
            rounded = self.oracle(x, mesh.shape, ("node", "gpu"))
            assert reference.small(x.dtype)
            assert_same(got[names.index("direct")], rounded, rtol=float(jnp.finfo(x.dtype).eps))
