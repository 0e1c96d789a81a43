"""The JAX contract of every collective: a base class for the tests of each op.

Guards against rules that are right for one transformation, axis order, algorithm or way of compiling and wrong for
another. The op is compared with its NumPy oracle, and with jax.lax on the same random inputs.
"""

import meshes
import numpy as np
import programs
import transformations
import values
from collective import VMA
from harness import LAX, OURS, assert_same, run


class Contract(meshes.Meshes, transformations.Transformations, programs.Programs, values.Values):
    pass


class GroupsContract(Contract):
    """For ops with axis_index_groups."""

    @VMA
    def test_axis_index_groups(self, mesh, rng, check_vma):
        x, order = self.integers(rng), np.array([6, 1, 0, 3, 7, 4, 2, 5])
        cases = {size: order.reshape(-1, size).tolist() for size in (4, 2, 1, 8)}

        def body(library, x):
            return {size: self.call(library, x, ("gpu", "node"), groups) for size, groups in cases.items()}

        want = {size: self.oracle(x, mesh.shape, ("gpu", "node"), groups) for size, groups in cases.items()}
        # jax.lax has no groups under check_vma=True.
        libraries = [OURS] if check_vma else [OURS, LAX]
        got = run(lambda x: [body(library, x) for library in libraries], mesh, x, check_vma=check_vma)
        assert_same(got, [want] * len(libraries))
