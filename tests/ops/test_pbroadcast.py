"""pbroadcast. Beyond the contract: every source, by every algorithm."""

import contract
import values


class TestPbroadcast(values.Arguments, contract.Contract):
    op = "pbroadcast"
    runs = tuple({"source": source} for source in range(4))

    @staticmethod
    def arguments(n):
        return {"source": n // 2}

    @staticmethod
    def every(n):
        return {(1009,): [{"source": source} for source in range(n)]}
