"""pmean: psum divided by the group size, with the element types of jax.lax."""

import collective
import contract
import sums


class TestPmean(sums.Sums, contract.GroupsContract):
    op = "pmean"
    exact = False  # XLA divides by multiplying
    sample = ("axes", "transformations", "axis_index_groups", "every_dtype", "dtypes_of_lax")
    dtypes = tuple(
        name for name in collective.ALL_DTYPES if "int2" not in name
    )  # division is not defined for these types
