"""pmean: psum divided by the group size, with the element types of jax.lax."""

import collective
import contract
import jax.numpy as jnp
import numpy as np
import sums
from harness import OURS, compare


class TestPmean(sums.Sums, contract.GroupsContract):
    op = "pmean"
    exact = False  # XLA divides by multiplying
    sample = (
        "axes", "transformations", "axis_index_groups", "every_dtype", "dtypes_of_lax", "dimensions_in_axis_name"
    )  # fmt: skip
    dtypes = tuple(
        name for name in collective.ALL_DTYPES if "int2" not in name
    )  # division is not defined for these types

    def test_dimensions_in_axis_name(self, mesh, rng):
        """jax.lax.pmean takes none. All counts are powers of two, by which division is exact."""
        x = rng.integers(-9, 9, (8, 4, 2)).astype(np.float32)
        for axes in (("gpu", 0), (1, "node"), (0, 1, "gpu"), (0,), 1):

            def mean(library, x, axes=axes):
                if library is OURS:
                    return library.pmean(x, axes)
                return library.psum(x, axes) / library.psum(jnp.ones_like(x), axes)

            compare(mean, mesh, x, check_vma=False)
