"""Mistakes in jaxcomm/, its ops aside: what a competent author could get wrong."""

from mutation.hand import Mutant

MUTANTS = [
    Mutant(
        "psum in groups typed as the same on all ranks",
        "jaxcomm/ops/psum.py",
        "    if call.groups is None:  # with groups, results differ between them\n        varying = varying",
        "    if True:\n        varying = varying",
        "tests/ops/test_psum.py::TestPsum::test_gradient_is_the_transpose",
    ),
]
