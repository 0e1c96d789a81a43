"""Part of the contract: ways to compile and run programs, reuse of buffers, merging of calls."""

import functools

import collective
import jax
import jax.numpy as jnp
import numpy as np
from harness import OURS, assert_same, compare, on_ranks, value
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm._request import NATIVE


class Programs(collective.Collective):
    @collective.MOSTLY_VMA
    def test_eager(self, mesh, rng, check_vma):
        x = self.integers(rng)
        got = on_ranks(functools.partial(self.call, OURS, axes=("node", "gpu")), mesh, check_vma=check_vma)(x)
        assert_same(value(got), self.oracle(x, mesh.shape, ("node", "gpu")))

    def test_ahead_of_time(self, mesh, rng):
        x = self.integers(rng)
        f = jax.jit(on_ranks(functools.partial(self.call, OURS, axes=("node", "gpu")), mesh))
        compiled = f.lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
        for factor in (1, 3):
            assert_same(value(compiled(factor * x)), self.oracle(factor * x, mesh.shape, ("node", "gpu")))

    def test_export_round_trip(self, mesh, rng):
        x = self.integers(rng)
        sharding = NamedSharding(mesh, P(("node", "gpu")))
        f = jax.jit(on_ranks(functools.partial(self.call, OURS, axes=("gpu", "node")), mesh), in_shardings=sharding)
        checks = [jax.export.DisabledSafetyCheck.custom_call(f"jaxcomm_{NATIVE[self.op]}")]
        exported = jax.export.export(f, disabled_checks=checks)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        again = jax.export.deserialize(exported.serialize())
        got = jax.jit(again.call)(jax.device_put(x, sharding))
        assert_same(value(got), self.oracle(x, mesh.shape, ("gpu", "node")))

    def test_donation(self, mesh, rng):
        """XLA may reuse the operand's memory for the result while peers still read it."""
        x = rng.integers(-64, 64, (8, 64, 33)).astype(np.float32)
        sharding = NamedSharding(mesh, P(("node", "gpu")))

        def body(x):
            y = self.call(OURS, x + 1, ("node", "gpu"))
            return x * 0 + jnp.sum(y), self.call(OURS, self.fold(y, x.shape), "gpu")

        f = jax.jit(on_ranks(body, mesh), donate_argnums=0)
        first, second = f(jax.device_put(x, sharding)), f(donated := jax.device_put(x, sharding))
        assert donated.is_deleted()
        first, second = value((first, second))
        assert_same(first, second)
        y = self.oracle(x + 1, mesh.shape, ("node", "gpu"))
        folded = np.stack([np.asarray(self.fold(row, x.shape[1:])) for row in y])
        assert_same(first[1], self.oracle(folded, mesh.shape, "gpu"))

    @staticmethod
    def fold(y, shape):
        """Returns some elements of y in another shape."""
        return jnp.resize(y, shape)

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

    def test_one_custom_call_per_use(self, mesh, rng):
        x = self.integers(rng)
        text = jax.jit(on_ranks(functools.partial(self.call, OURS, axes="gpu"), mesh)).lower(x).as_text()
        assert text.count(f"@jaxcomm_{NATIVE[self.op]}(") == 1

    def test_equal_calls_are_not_merged(self, mesh, rng):
        x = self.integers(rng)

        def body(x):
            return [self.call(OURS, x, "gpu") for _ in range(3)]

        compiled = jax.jit(on_ranks(body, mesh)).lower(x).compile()
        assert compiled.as_text().count(f'custom_call_target="jaxcomm_{NATIVE[self.op]}"') == 3
        assert_same(value(compiled(x)), [self.oracle(x, mesh.shape, "gpu")] * 3)
