"""Part of the contract: eager runs, reuse of buffers, merging of calls."""

import functools

import collective
import jax
import jax.numpy as jnp
from harness import OURS, assert_same, compare, on_ranks, value

from jaxcomm._request import NATIVE


class Programs(collective.Collective):
    def test_eager(self, mesh, rng):
        x = self.integers(rng)
        got = on_ranks(functools.partial(self.call, OURS, axes=("node", "gpu")), mesh)(x)
        assert_same(value(got), self.oracle(x, mesh.shape, ("node", "gpu")))

    def test_result_feeds_on_its_operand_later(self, mesh, rng):
        """XLA must not reuse the operand's buffer before all peers have read it."""
        x = self.integers(rng, block=(64, 33))

        def body(library, x):
            total = x * 0
            for i in range(6):
                y = self.call(library, x * (i + 1), ("node", "gpu"))
                total = total + x * (i - 2) + jnp.max(y)
            return total

        compare(body, mesh, x)

    def test_equal_calls_are_not_merged(self, mesh, rng):
        x = self.integers(rng)

        def body(x):
            return [self.call(OURS, x, "gpu") for _ in range(3)]

        compiled = jax.jit(on_ranks(body, mesh)).lower(x).compile()
        assert compiled.as_text().count(f'custom_call_target="jaxcomm_{NATIVE[self.op]}"') == 3
        assert_same(value(compiled(x)), [self.oracle(x, mesh.shape, "gpu")] * 3)
