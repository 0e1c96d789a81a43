"""pmax. Beyond the contract: special values and every element type."""

import contract
import ordered


class TestPmax(ordered.Ordered, contract.Contract):
    op = "pmax"
