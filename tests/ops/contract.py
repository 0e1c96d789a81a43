"""The JAX contract of every collective: a base class for the tests of each op.

Guards against rules that are right for one mesh, algorithm, type or way of compiling and wrong for another. Options,
derivatives and transformations are in test_options_of_ops.py.
"""

import meshes
import values


class Contract(meshes.Meshes, values.Values):
    pass
