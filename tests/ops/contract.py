"""The JAX contract of every collective: a base class for the tests of each op.

Guards against rules that are right for one mesh, algorithm, type or way of compiling and wrong for another. Options,
derivatives and transformations are in test_options_of_ops.py.
"""

import functools
import math

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import values
from collective import make_mesh
from harness import LAX, OURS, assert_same, compare, on_ranks, run, value
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm._request import NATIVE

# Groups of one rank, of all ranks, of no power of two; axes in each order, and axes that are not adjacent.
GROUPS = [
    ({"a": 8, "b": 1}, ("b",)),
    ({"a": 1, "b": 8}, ("b",)),
    ({"a": 1, "b": 3}, ("b",)),
    ({"a": 2, "b": 4}, ("b", "a")),
    ({"a": 2, "b": 3}, ("a", "b")),
    ({"a": 2, "b": 2, "c": 2}, ("c", "a")),
]


class Contract(values.Values):
    @pytest.mark.parametrize(("sizes", "axes"), GROUPS, ids=str)
    def test_every_algorithm_in_groups(self, rng, sizes, axes):
        """Integers, so that all algorithms agree in every bit. The selection table's choice is among them."""
        x = self.integers(rng, math.prod(sizes.values()))
        names = [None, *collective.fitting(self.op, sizes, axes)]
        got = run(lambda x: {str(a): self.call(OURS, x, axes, algorithm=a) for a in names}, make_mesh(sizes), x)
        assert len(names) > 1
        assert_same(got, dict.fromkeys(map(str, names), self.oracle(x, sizes, axes)), rtol=None if self.exact else 1e-6)

    def test_mesh_without_devices(self, mesh, rng):
        x = self.integers(rng)
        f = on_ranks(functools.partial(self.call, OURS, axes="gpu"), mesh.abstract_mesh)
        if jax.process_count() > 1:  # the processes of its devices are unknown
            with pytest.raises(NotImplementedError, match="AbstractMesh"):
                jax.jit(f)(jax.device_put(x, NamedSharding(mesh, P(("node", "gpu")))))
            return
        got = jax.jit(f)(jax.device_put(x, NamedSharding(mesh, P(("node", "gpu")))))
        assert_same(value(got), self.oracle(x, mesh.shape, "gpu"))

    @pytest.mark.parametrize(("manual", "spmd"), [({"gpu"}, None), ({"node", "gpu"}, "node")], ids=["partial", "spmd"])
    def test_vmap_of_shard_map(self, mesh, rng, manual, spmd):
        x = rng.standard_normal((4, 2, *collective.BLOCK), np.float32)
        batched = jax.device_put(x, NamedSharding(mesh, P("gpu", "node")))

        def outcome(library, x):
            f = jax.shard_map(
                lambda x: self.call(library, x[0], "gpu")[None], mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"),
                axis_names=manual,
            )  # fmt: skip
            return jax.vmap(f, 1, 1, spmd_axis_name=spmd)(x)

        ours, lax = value(jax.jit(lambda x: (outcome(OURS, x), outcome(LAX, x)))(batched))
        assert_same(ours, lax, rtol=1e-6)

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
