"""pbroadcast. Beyond the contract: every source. XLA:CPU has no such op, so harness.py defines the reference."""

import collective
import contract
import numpy as np
from harness import OURS, assert_same, run


class TestPbroadcast(contract.Contract):
    op = "pbroadcast"

    @staticmethod
    def arguments(n):
        return {"source": n // 2}

    def test_every_algorithm_from_every_source(self, mesh, rng):
        x = rng.integers(-99, 99, (8, 1009)).astype(np.int32)
        names, sources = collective.fitting(self.op, collective.MESH, ("node", "gpu")), np.arange(8, dtype=np.int32)

        def body(x):
            return {f"{a} {s}": OURS.pbroadcast(x, ("node", "gpu"), s, algorithm=a) for a in names for s in sources}

        got = run(body, mesh, x)
        want = {f"{a} {s}": self.oracle(x, mesh.shape, ("node", "gpu"), source=s) for a in names for s in range(8)}
        assert_same(got, want)
