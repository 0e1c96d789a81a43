"""all_to_all. Beyond the contract: every pair of split and concat axis, tiled and not, whose strides differ."""

import itertools

import contract
import numpy as np
import values
from harness import OURS, assert_same, run


class TestAllToAll(values.Arguments, contract.Contract):
    op = "all_to_all"
    runs = tuple({"split_axis": split, "concat_axis": concat} for split, concat in ((1, 0), (0, 1), (1, 1)))

    @staticmethod
    def arguments(n):
        return {"split_axis": 0, "concat_axis": 0, "tiled": True}

    @staticmethod
    def every(n):
        pairs = [{"split_axis": i, "concat_axis": j} for i, j in itertools.product(range(4), range(4))]
        return {
            (n, 2 * n, n, n): [{**pair, "tiled": True} for pair in pairs],
            (n, n, n, n): [{**pair, "tiled": False} for pair in pairs],
        }

    def test_more_than_the_caches_hold(self, mesh, rng):
        x = rng.integers(-99, 99, (8, 8 * 131101), np.int32)
        got = run(lambda x: OURS.all_to_all(x, ("node", "gpu"), 0, 0, tiled=True), mesh, x)
        assert_same(got, self.oracle(x, mesh.shape, ("node", "gpu")))
