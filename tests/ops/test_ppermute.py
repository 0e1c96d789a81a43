"""ppermute. Beyond the contract: any partial permutation, in any form that jax.lax accepts."""

import collective
import contract
import numpy as np
import pytest
from harness import OURS, assert_same, compare, run

PERMUTATIONS = {
    "shift": [(i, (i + 1) % 8) for i in range(8)],
    "reverse": [(i, 7 - i) for i in range(8)],
    "one pair": [(5, 2)],
    "swap": [(0, 1), (1, 0)],
    "to itself": [(3, 3), (4, 6)],
    "nothing": [],
    "gap": [(0, 7), (7, 3), (2, 5)],
}


class TestPpermute(contract.Contract):
    op = "ppermute"

    @staticmethod
    def arguments(n):
        return {"perm": [(i, (i + 1) % n) for i in range(n) if i != 2]}

    @collective.VMA
    def test_partial_permutations(self, mesh, rng, check_vma):
        x = self.integers(rng)

        def body(library, x):
            return {name: library.ppermute(x, ("node", "gpu"), perm) for name, perm in PERMUTATIONS.items()}

        got = compare(body, mesh, x, check_vma=check_vma)
        for name, perm in PERMUTATIONS.items():
            assert_same({name: got[name]}, {name: self.oracle(x, mesh.shape, ("node", "gpu"), perm=perm)})

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
