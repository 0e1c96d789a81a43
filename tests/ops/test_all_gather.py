"""all_gather. Beyond the contract: the position of the new or joined axis, and results typed as invariant."""

import contract
import harness
import jax
import numpy as np
import values
from harness import OURS, assert_same, compare, run
from jax import lax
from jax.sharding import PartitionSpec as P


class TestAllGather(values.Arguments, contract.Contract):
    op = "all_gather"

    @staticmethod
    def arguments(n):
        return {"axis": 0, "tiled": True}

    runs = ({"axis": 1},)

    @staticmethod
    def every(n):
        return {(3, 5, 7): [{"axis": axis, "tiled": t} for t in (True, False) for axis in range(t - 4, 4 - t)]}

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
                ys = [library.all_gather(x, "gpu", axis=a, tiled=a < 2, to="reduced") for a in range(3)]
                assert all("gpu" in jax.typeof(y).manual_axis_type.reduced for y in ys)
                return [lax.axis_index("gpu").astype(np.float32) * y for y in ys]

            with jax.set_mesh(mesh):
                return jax.jit(jax.shard_map(body, in_specs=P("gpu"), out_specs=P("gpu")))(jax.device_put(x, P("gpu")))

        assert_same(harness.value(outcome(OURS)), harness.value(outcome(harness.LAX)))
