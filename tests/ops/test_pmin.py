"""pmin. Beyond the contract: special values and every element type."""

import contract
import ordered


class TestPmin(ordered.Ordered, contract.GroupsContract):
    op = "pmin"
    sample = ("axes", "special_values", "every_dtype")
