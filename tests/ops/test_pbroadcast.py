"""pbroadcast. Beyond the contract: every source. XLA:CPU has no such op: harness.py has what jax.lax says it is."""

import collective
import contract
import numpy as np
import pytest
from harness import OURS, assert_same, run


class TestPbroadcast(contract.Contract):
    op = "pbroadcast"

    @staticmethod
    def arguments(n):
        return {"source": n // 2}

    @pytest.mark.parametrize("axes", [("node", "gpu"), ("gpu", "node")], ids=str)
    def test_every_source(self, mesh, rng, axes):
        x = self.integers(rng)
        got = run(lambda x: [OURS.pbroadcast(x, axes, np.int32(source)) for source in range(8)], mesh, x)
        assert_same(got, [self.oracle(x, mesh.shape, axes, source=source) for source in range(8)])

    def test_every_algorithm_from_every_source(self, mesh, rng):
        x = rng.integers(-99, 99, (8, 1009)).astype(np.int32)
        names = collective.fitting(self.op, collective.MESH, ("node", "gpu"))

        def body(x):
            return {f"{a} {s}": OURS.pbroadcast(x, ("node", "gpu"), s, algorithm=a) for a in names for s in range(8)}

        got = run(body, mesh, x)
        want = {f"{a} {s}": self.oracle(x, mesh.shape, ("node", "gpu"), source=s) for a in names for s in range(8)}
        assert_same(got, want)
