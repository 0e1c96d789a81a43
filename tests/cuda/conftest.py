"""Fixtures for the results of `make cuda`. The tests in this folder need no GPU and no driver."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cuda" / "tools"))  # the programs that `make` runs, and their modules


@pytest.fixture(scope="session")
def build():
    """The build folder of the installed module. Tests of another folder would prove nothing about this module."""
    spec = importlib.util.find_spec("jaxcomm._cuda")
    assert spec is not None, "there is no jaxcomm._cuda: run `make cuda`"
    module = pathlib.Path(spec.origin)
    folders = [*(ROOT / "build" / "cuda").glob(f"{pathlib.Path(sys.prefix).name}*"), *(ROOT / "build").glob("native*")]
    built = [path for folder in folders for path in folder.glob("_cuda.*.so")]
    equal = [path for path in built if path.read_bytes() == module.read_bytes()]
    assert equal, f"{module} matches no build in {ROOT}/build: run `make cuda`"
    # Builds of several environments may be equal. The installation keeps the time of the file.
    return min(equal, key=lambda path: abs(path.stat().st_mtime - module.stat().st_mtime)).parent


@pytest.fixture(scope="session")
def architectures(request):
    """Generations of GPUs that the tests of this size compile for."""
    return ("sm_90",) if request.config.getoption("--size") == "default" else ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture(scope="session")
def wheels():
    """NVIDIA's packages with which the module was built."""
    return ROOT / "build" / "cuda" / "wheels" / "nvidia"
