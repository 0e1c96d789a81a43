"""all_to_all. Beyond the contract: every pair of split and concat axis, tiled and not, whose strides differ."""

import itertools

import collective
import contract
import numpy as np
import pytest
from harness import OURS, assert_same, compare, run


class TestAllToAll(contract.GroupsContract):
    op = "all_to_all"

    @staticmethod
    def arguments(n):
        return {"split_axis": 0, "concat_axis": 0, "tiled": True}

    variant = {"split_axis": 1, "concat_axis": 0}  # noqa: RUF012

    @collective.MOSTLY_VMA
    @pytest.mark.parametrize("axes", ["gpu", ("node", "gpu")], ids=str)
    @pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "untiled"])
    def test_every_split_and_concat_axis(self, mesh, rng, axes, tiled, check_vma):
        n = 4 if axes == "gpu" else 8
        x = rng.integers(-99, 99, (8, n, 2 * n, n, n) if tiled else (8, n, n, n, n)).astype(np.int16)
        pairs = list(itertools.product(range(4), range(4)))

        def body(library, x):
            return {str(pair): library.all_to_all(x, axes, *pair, tiled=tiled) for pair in pairs}

        # XLA takes seconds to compile so many all_to_all of its own.
        got = run(lambda x: body(OURS, x), mesh, x) if check_vma else compare(body, mesh, x, check_vma=False)
        for split, concat in pairs:
            want = self.oracle(x, mesh.shape, axes, split_axis=split, concat_axis=concat, tiled=tiled)
            assert_same({(split, concat): got[str((split, concat))]}, {(split, concat): want})

    def test_short_and_long_runs(self, mesh, rng):
        """Blocks of one element, of a cache line, of a page: each takes another path of the strided copy."""
        xs = [rng.integers(-99, 99, (8, 40, 16, width)).astype(np.int32) for width in (1, 5, 16, 1031)]
        pairs = [(1, 0), (0, 1), (1, 1)]
        got = run(lambda *xs: [[OURS.all_to_all(x, "gpu", *p, tiled=True) for p in pairs] for x in xs], mesh, *xs)
        for x, results in zip(xs, got, strict=True):
            for (split, concat), result in zip(pairs, results, strict=True):
                assert_same(result, self.oracle(x, mesh.shape, "gpu", split_axis=split, concat_axis=concat))

    def test_more_than_the_caches_hold(self, mesh, rng):
        x = rng.integers(-99, 99, (8, 8 * 131101), np.int32)
        got = run(lambda x: OURS.all_to_all(x, ("node", "gpu"), 0, 0, tiled=True), mesh, x)
        assert_same(got, self.oracle(x, mesh.shape, ("node", "gpu")))
