"""pmean: psum divided by the group size, with the element types of jax.lax."""

import contract
import sums


class TestPmean(sums.Sums, contract.GroupsContract):
    op = "pmean"
    exact = False  # XLA divides by multiplying
    dtypes = tuple(name for name in contract.ALL_DTYPES if "int2" not in name)  # no quotient of these is defined
