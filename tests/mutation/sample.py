"""Runs a few mutants for continuous integration: of three C++ files, of one Python module, and some made by hand.

A sample this small shows whether the tests still see mistakes. It measures no rate.
"""

import pathlib
import re

from . import cxx, hand, operators, python, record, trees

SLOW_TO_BUILD = re.compile(r"test_cuda_|multiprocess|hosts|models")
CXX = ("ffi/plan", "ffi/plan/algorithms", "ffi/cpu", "ffi/transport", "ffi/recorder")
PYTHON = ("jaxcomm", "jaxcomm/ops", "jaxcomm/matmul")
SHARES = {"cxx": 0.5, "python": 0.3}  # the rest is made by hand
CXX_FILES = 3  # of one folder. Half of the mutants of a single file may be equivalent.
ENOUGH = 5  # mutants of a Python module


def files(folders, suffix, seed):
    """The files of the folders in the order of the seed."""
    found = [path.relative_to(trees.ROOT) for name in folders for path in (trees.ROOT / name).glob(f"*{suffix}")]
    return sorted(map(str, found), key=lambda name: record.order(seed, name))


def is_slow(mutant):
    """Whether the tests of a mutant need the module with the mistake, or a long build."""
    return SLOW_TO_BUILD.search(mutant.tests) or (mutant.file.startswith("ffi/") and ".py" in mutant.tests)


def run(count, seed, jobs=2, only=None):
    """Returns the results."""
    results = []
    number = {kind: round(count * share) for kind, share in SHARES.items()}
    if only in (None, "cxx"):
        names = files(CXX, ".cc", seed)
        folder = "/".join(pathlib.Path(names[0]).parts[:2])
        chosen = [name for name in names if name.startswith(folder + "/")][:CXX_FILES]
        results += cxx.run(folder, number["cxx"], seed, jobs, files=chosen)
    if only in (None, "python"):
        fast = [name for name in files(PYTHON, ".py", seed) if not SLOW_TO_BUILD.search(" ".join(python.tests(name)))]
        name = next(name for name in fast if python.tests(name) and len(operators.mutants(trees.ROOT, name)) >= ENOUGH)
        results += python.run(str(pathlib.Path(name).parent), number["python"], seed, jobs, file=name)
    if only in (None, "hand"):
        folders = {hand.folder(mutant) for mutant in hand.mistakes()}
        quick = [mutant for mutant in hand.choose(seed, folders) if hand.fits(mutant) and not is_slow(mutant)]
        results += hand.run(quick[: count - sum(number.values())], jobs)[0]
    return results
