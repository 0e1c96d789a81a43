"""all_gather. Beyond the contract: the position of the new or joined axis, and results typed as invariant."""

import collective
import contract
import harness
import jax
import numpy as np
import pytest
from harness import OURS, assert_same, compare, run
from jax import lax
from jax.sharding import PartitionSpec as P

CASES = [(axis, tiled) for tiled in (True, False) for axis in range(-3 - (not tiled), 3 + (not tiled))]


class TestAllGather(contract.GroupsContract):
    op = "all_gather"

    @staticmethod
    def arguments(n):
        return {"axis": 0, "tiled": True}

    variant = {"axis": 1, "tiled": False}  # noqa: RUF012

    @collective.MOSTLY_VMA
    @pytest.mark.parametrize("axes", ["gpu", ("node", "gpu")], ids=str)
    def test_every_axis(self, mesh, rng, axes, check_vma):
        x = rng.integers(-99, 99, (8, 3, 5, 7)).astype(np.int16)

        def body(library, x):
            return {str(case): library.all_gather(x, axes, axis=case[0], tiled=case[1]) for case in CASES}

        got = compare(body, mesh, x, check_vma=check_vma)
        for axis, tiled in CASES:
            want = self.oracle(x, mesh.shape, axes, axis=axis, tiled=tiled)
            assert_same({(axis, tiled): got[str((axis, tiled))]}, {(axis, tiled): want})

    def test_short_and_long_runs(self, mesh, rng):
        xs = [rng.integers(-99, 99, (8, 40, width)).astype(np.int32) for width in (1, 5, 16, 1031)]
        got = run(lambda *xs: [OURS.all_gather(x, "gpu", axis=1, tiled=True) for x in xs], mesh, *xs)
        assert_same(got, [self.oracle(x, mesh.shape, "gpu", axis=1) for x in xs])

    def test_result_typed_as_equal_over_its_own_axes_only(self, mesh, rng):
        x = rng.integers(-9, 9, (16, 3)).astype(np.float32)

        def gathered(axes, out_specs):
            def body(x):
                return OURS.all_gather(x, axes, tiled=True, to="invarying")

            return jax.shard_map(body, mesh=mesh, in_specs=P(("node", "gpu")), out_specs=out_specs)

        assert_same(harness.value(jax.jit(gathered("gpu", P("node")))(x)), x)
        with pytest.raises(ValueError, match=r"varying|out_specs"):
            jax.eval_shape(gathered("gpu", P()), x)
        inner = jax.grad(lambda x: jax.numpy.sum(gathered("gpu", P("node"))(x) * w))
        w = rng.integers(-9, 9, (16, 3)).astype(np.float32)
        assert_same(harness.value(jax.jit(inner)(x)), w)

    def test_gradient_of_a_type_that_executors_do_not_add(self, mesh):
        x = np.ones((8, 4), jax.numpy.float8_e8m0fnu)
        compare(
            lambda library, x: jax.grad(lambda x: library.all_gather(x, "gpu").astype(np.float32).sum())(x), mesh, x
        )

    def test_no_axes(self, mesh, rng):
        x = self.integers(rng)
        assert_same(run(lambda x: OURS.all_gather(x, (), tiled=True), mesh, x), x)

    def test_result_typed_as_reduced_equals_that_of_lax(self, rng):
        mesh = jax.make_mesh((8,), ("gpu",), axis_types=(jax.sharding.AxisType.Explicit,))
        x = rng.standard_normal((16, 3), np.float32)

        def outcome(library):
            def body(x):
                y = library.all_gather(x, "gpu", tiled=True, to="reduced")
                assert "gpu" in jax.typeof(y).manual_axis_type.reduced
                return lax.axis_index("gpu").astype(np.float32) * y

            with jax.set_mesh(mesh):
                return jax.jit(jax.shard_map(body, in_specs=P("gpu"), out_specs=P("gpu")))(jax.device_put(x, P("gpu")))

        assert_same(harness.value(outcome(OURS)), harness.value(outcome(harness.LAX)))
