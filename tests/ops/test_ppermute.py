"""ppermute. Beyond the contract: any partial permutation, in any form that jax.lax accepts."""

import collective
import contract
import numpy as np
import pytest
import values
from harness import OURS, assert_same, run


class TestPpermute(values.Arguments, contract.Contract):
    op = "ppermute"
    runs = ({"perm": [(0, 3), (3, 1), (2, 0)]},)

    @staticmethod
    def arguments(n):
        return {"perm": [(i, (i + 1) % n) for i in range(n) if i != 2]}

    @staticmethod
    def every(n):
        permutations = {
            "shift": [(i, (i + 1) % n) for i in range(n)],
            "reverse": [(i, n - 1 - i) for i in range(n)],
            "one pair": [(n - 1, 2)],
            "swap": [(0, 1), (1, 0)],
            "to itself": [(3, 3), (n // 2, 0)],
            "nothing": [],
            "gap": [(0, n - 1), (n - 1, 1), (2, 3)] if n > 4 else [(0, 3), (3, 1)],
        }
        return {(3, 5): [{"perm": perm} for perm in permutations.values()]}

    def test_group_of_one(self, mesh, rng):
        """The result is not always the operand: a rank that receives nothing gets zeros."""
        x, alone = self.integers(rng), collective.make_mesh({"one": 1, "gpu": 8})
        got = run(lambda x: [OURS.ppermute(x, "one", perm) for perm in ([], [(0, 0)])], alone, x)
        assert_same(got, [0 * x, x])

    @pytest.mark.parametrize("form", [list, tuple, np.array, iter, np.int8])
    def test_forms_of_perm(self, mesh, rng, form):
        x, pairs = self.integers(rng), [(0, 1), (1, 2)]
        got = run(lambda x: OURS.ppermute(x, "gpu", form(pairs)), mesh, x)
        assert_same(got, self.oracle(x, mesh.shape, "gpu", perm=pairs))
