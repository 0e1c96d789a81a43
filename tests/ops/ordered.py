"""Tests that pmax and pmin share: NaN, infinities and signed zeros, and every element type that has an order."""

import itertools

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LAX, OURS, on_ranks, run

COMMON = ["float8_e4m3fn", "bfloat16", "float32"]
RARE = [name for name in (*collective.SMALL_FLOATS[1:], "float16", "float64") if name not in COMMON]  # 4 bits: no NaN
FLOATS = COMMON + [pytest.param(name, marks=pytest.mark.full) for name in dict.fromkeys(RARE)]


class Ordered:
    dtypes = tuple(name for name in collective.ALL_DTYPES if not name.startswith("complex"))

    def elements(self, rng, shape, name):
        """All values except NaN, whose payload is unspecified, and f32 subnormals, which XLA flushes to zero."""
        x = collective.any_bits(rng, shape, name)
        if "float" not in name:
            return x
        with np.errstate(invalid="ignore"):
            wide = x.astype(np.float64)
            plain = (np.abs(wide) >= 2.0**-126) & (np.abs(wide) < np.inf)
            return np.where(plain, wide, 1).astype(x.dtype)

    @pytest.mark.parametrize("name", FLOATS)
    def test_special_values(self, mesh, name):
        """All pairs of NaN, infinities, zeros of both signs and ordinary numbers, on two ranks and among eight.

        NaN wins, and -0 is less than +0, in any order. jax.lax on CPU gives the same results for other values only: it
        loses NaN and returns either zero, depending on the order.
        """
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0]
        pairs = np.array(list(itertools.product(special, special)))
        with np.errstate(invalid="ignore"), jax.enable_x64(True):
            two = np.repeat(pairs.T, 4, axis=0).astype(jnp.dtype(name))  # differs between nodes
            eight = np.where(np.arange(8)[:, None] == 5, pairs[:, 1], pairs[:, 0]).astype(jnp.dtype(name))
            calls = [("node", a) for a in collective.fitting(self.op, collective.MESH, ("node",))]
            calls += [(("node", "gpu"), a) for a in collective.fitting(self.op, collective.MESH, ("node", "gpu"))]

            def body(x, y):
                return [self.call(OURS, x if axes == "node" else y, axes, algorithm=a) for axes, a in calls]

            got, from_lax = run(lambda x, y: (body(x, y), self.call(LAX, x, "node")), mesh, two, eight)
        pairs = pairs.astype(jnp.dtype(name)).astype(np.float64)
        nan = np.isnan(pairs).any(1)
        lesser_zero = np.signbit(pairs).all(1) if self.op == "pmax" else np.signbit(pairs).any(1)
        zeros = (pairs == 0).all(1)
        for call, result in zip(calls, got, strict=True):
            rows = result.astype(np.float64)
            np.testing.assert_array_equal(np.isnan(rows), np.stack([nan] * 8), str(call))
            np.testing.assert_array_equal(np.signbit(rows[:, zeros]), np.stack([lesser_zero[zeros]] * 8), str(call))
            np.testing.assert_array_equal(rows[:, ~nan], from_lax.astype(np.float64)[:, ~nan], str(call))

    def test_no_derivative(self, mesh):
        f = on_ranks(jax.grad(lambda x: jnp.sum(self.call(OURS, x, "gpu"))), mesh)
        with pytest.raises(NotImplementedError, match=f"{self.op} at collective.py:.* has no derivative"):
            jax.eval_shape(f, np.zeros((8, *collective.BLOCK), np.float32))
