"""pmean: psum divided by the group size, with the element types of jax.lax."""

import collective
import contract
import sums


class TestPmean(sums.Sums, contract.Contract):
    op = "pmean"
    exact = False  # XLA divides by multiplying
    sample = ("every_dtype",)
    dtypes = tuple(name for name in collective.ALL_DTYPES if "int2" not in name)  # which division is not defined for
