"""psum_scatter. Beyond the contract: every dimension, and the precision of sums."""

import contract
import sums
import values


class TestPsumScatter(sums.Sums, values.Arguments, contract.Contract):
    op = "psum_scatter"
    dtypes = sums.DTYPES  # jax.lax rejects bool
    runs = ({"scatter_dimension": 1},)

    @staticmethod
    def arguments(n):
        return {"scatter_dimension": 0, "tiled": True}

    @staticmethod
    def every(n):
        return {(n, n, n): [{"scatter_dimension": d, "tiled": tiled} for tiled in (True, False) for d in range(-3, 3)]}
