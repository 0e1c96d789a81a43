"""What `make cuda` leaves behind; the tests here need nothing else, no GPU and no driver."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cuda" / "tools"))  # what `make` runs, and its parts


@pytest.fixture(scope="session")
def build():
    """The build folder of this environment."""
    folder = ROOT / "build" / "cuda" / pathlib.Path(sys.prefix).name
    assert (folder / "CMakeCache.txt").exists(), f"{folder} is not there: run `make cuda`"
    return folder


@pytest.fixture(scope="session")
def wheels():
    """NVIDIA's packages that the module was built with."""
    return ROOT / "build" / "cuda" / "wheels" / "nvidia"
