"""pbroadcast. Beyond the contract: every source. XLA:CPU has no such op, so harness.py defines the reference."""

import math

import collective
import contract
import jax
import numpy as np
from harness import OURS, assert_same, run


class TestPbroadcast(contract.Contract):
    op = "pbroadcast"

    @staticmethod
    def arguments(n):
        return {"source": n // 2}

    def test_every_source_over_axes_of_vmap(self, mesh, rng):
        """The source is an index along the mapped axis and a rank along the others, in the order of the axes."""
        x = rng.integers(-9, 9, (8, 3, 5)).astype(np.float32)
        for axes in (("i", "gpu"), ("node", "i", "gpu"), ("gpu", "i", "node")):
            n = 3 * math.prod(mesh.shape[a] for a in axes if a != "i")

            def body(x, axes=axes, n=n):
                return [jax.vmap(lambda x: OURS.pbroadcast(x, axes, s), axis_name="i")(x) for s in range(n)]  # noqa: B023

            want = [self.oracle(x.reshape(24, 5), {**mesh.shape, "i": 3}, axes, source=s) for s in range(n)]
            assert_same(run(body, mesh, x), [rows.reshape(8, 3, 5) for rows in want])

    def test_every_algorithm_from_every_source(self, mesh, rng):
        x = rng.integers(-99, 99, (8, 1009)).astype(np.int32)
        names, sources = collective.fitting(self.op, collective.MESH, ("node", "gpu")), np.arange(8, dtype=np.int32)

        def body(x):
            return {f"{a} {s}": OURS.pbroadcast(x, ("node", "gpu"), s, algorithm=a) for a in names for s in sources}

        got = run(body, mesh, x)
        want = {f"{a} {s}": self.oracle(x, mesh.shape, ("node", "gpu"), source=s) for a in names for s in range(8)}
        assert_same(got, want)
