"""pmin. Beyond the contract: special values and every element type."""

import contract
import ordered


class TestPmin(ordered.Ordered, contract.Contract):
    op = "pmin"
    sample = ("special_values", "every_dtype", "no_derivative")
