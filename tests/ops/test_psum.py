"""psum. Beyond the contract: precision of sums, and equal bits on all ranks and in every execution."""

import collective
import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sums
from harness import OURS, assert_same, compare, on_ranks, run, value
from jax.sharding import PartitionSpec as P


class TestPsum(sums.Sums, contract.Contract):
    op = "psum"

    @collective.VMA
    def test_constants_are_multiplied_without_communication(self, mesh, rng, check_vma):
        def body(library, x):
            one = library.psum(1, ("node", "gpu"))
            assert isinstance(one, int) or one.shape == ()
            of_groups = () if check_vma else library.psum(1.0, "gpu", axis_index_groups=[[0, 1], [2, 3]])
            constants = library.psum(np.arange(3), "gpu"), library.psum({"a": True, "b": 2.5}, "gpu")
            if not check_vma:
                constants += library.psum(np.arange(6.0).reshape(2, 3), ("gpu", 1)), library.pmean(np.ones(3), "node")
            return x * int(one), of_groups, constants, library.psum((x, 2.0, np.ones(3, np.float32)), ())

        f = on_ranks(lambda x: body(OURS, x), mesh, check_vma=check_vma)
        x = self.integers(rng)
        assert "jaxcomm_" not in jax.jit(f).lower(x).as_text()
        compare(body, mesh, x, check_vma=check_vma)

    @collective.VMA
    def test_constants_among_traced_leaves(self, mesh, rng, check_vma):
        def body(library, x):
            return [getattr(library, op)((x, 2.0, np.ones(3, np.float32)), "gpu") for op in ("psum", "pmean", "pmax")]

        compare(body, mesh, self.integers(rng), check_vma=check_vma)

    def test_a_pending_sum_is_finished_as_jax_does(self, rng):
        """Types distinguish shares of a sum from copies: psum adds shares, and its gradient is a copy."""
        mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        x = rng.integers(-9, 9, (16,)).astype(np.float32)

        def outcome(library):
            def body(x):
                return library.psum(jax.lax.pcast(x, "gpu", to="unreduced"), "gpu")

            f = jax.shard_map(body, in_specs=P(("node", "gpu")), out_specs=P("node"))
            return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)

        with jax.set_mesh(mesh):
            x = jax.device_put(x, P(("node", "gpu")))
            ours, lax = value(jax.jit(lambda x: (outcome(OURS), outcome(jax.lax)))(x))
        assert_same(ours, lax)


@pytest.mark.parametrize("op", ["psum", "pmean", "pmax", "pmin"])
def test_dimensions_in_axis_name(mesh, rng, op):
    """All counts are powers of two, by which division is exact."""
    x = rng.integers(-9, 9, (8, 4, 2)).astype(np.float32 if op == "pmean" else np.int8)
    choices = [("gpu", 0), (1, "node"), (0, 1), (0, 1, "gpu"), (0,), 1]
    got = run(lambda x: [getattr(OURS, op)(x, axes) for axes in choices], mesh, x, check_vma=False)
    reduce = {"psum": np.sum, "pmean": np.mean, "pmax": np.max, "pmin": np.min}[op]
    for axes, result in zip(choices, got, strict=True):
        axes = axes if isinstance(axes, tuple) else (axes,)
        where = [2 + a if isinstance(a, int) else list(mesh.shape).index(a) for a in axes]
        want = reduce(x.reshape(2, 4, 4, 2), tuple(where), keepdims=True).astype(x.dtype)
        want = np.broadcast_to(want, (2, 4, *want.shape[2:])).squeeze(tuple(d for d in where if d >= 2))
        assert_same(result, want.reshape(8, *want.shape[2:]))
