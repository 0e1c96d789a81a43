"""psum_scatter. Beyond the contract: every dimension, and the precision of sums."""

import functools

import collective
import contract
import numpy as np
import pytest
import sums
from harness import OURS, assert_same, compare, run

CASES = [(dimension, tiled) for tiled in (True, False) for dimension in range(-3, 3)]


class TestPsumScatter(sums.Sums, contract.GroupsContract):
    op = "psum_scatter"
    dtypes = sums.DTYPES  # jax.lax rejects bool

    @staticmethod
    def arguments(n):
        return {"scatter_dimension": 0, "tiled": True}

    variant = {"scatter_dimension": 1}  # noqa: RUF012

    @collective.MOSTLY_VMA
    @pytest.mark.parametrize("axes", ["gpu", ("node", "gpu")], ids=str)
    def test_every_dimension(self, mesh, rng, axes, check_vma):
        n = 4 if axes == "gpu" else 8
        x = rng.integers(-99, 99, (8, n, n, n)).astype(np.int16)

        def body(library, x, cases):
            return {str(c): library.psum_scatter(x, axes, scatter_dimension=c[0], tiled=c[1]) for c in cases}

        compare(lambda lib, x: body(lib, x, [c for c in CASES if c[0] >= 0]), mesh, x, check_vma=check_vma)
        got = run(lambda x: body(OURS, x, CASES), mesh, x, check_vma=check_vma)
        for dimension, tiled in CASES:
            want = self.oracle(x, mesh.shape, axes, scatter_dimension=dimension, tiled=tiled)
            assert_same({(dimension, tiled): got[str((dimension, tiled))]}, {(dimension, tiled): want})

    def test_short_and_long_runs(self, mesh, rng):
        """Contiguous runs below and above the size from which the reduction gathers its operands first."""
        xs = [rng.integers(-99, 99, (8, 40, 16, width)).astype(np.int32) for width in (1, 5, 16, 1031)]
        names = collective.fitting(self.op, collective.MESH, ("gpu",))

        def body(*xs):
            calls = [functools.partial(OURS.psum_scatter, scatter_dimension=1, tiled=True, algorithm=a) for a in names]
            return [[call(x, "gpu") for call in calls] for x in xs]

        want = [[self.oracle(x, mesh.shape, "gpu", scatter_dimension=1)] * len(names) for x in xs]
        assert_same(run(body, mesh, *xs), want)
