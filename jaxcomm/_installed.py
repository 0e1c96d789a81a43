"""What the installation has besides Python files: the compiled module and the headers of the device API.

Python searches the working directory first. In a checkout it finds these sources instead of the installed package,
unless the installation is editable. So `jaxcomm/__init__.py` imports this file before all others: it raises an
ImportError with the remedy if this folder has no compiled module.
"""

import importlib.util
import pathlib

_spec = importlib.util.find_spec("jaxcomm._core")

# Without a location it is the folder of the module's type stubs, which `make` puts beside the sources.
if _spec is None or not _spec.has_location:
    raise ImportError(
        f"jaxcomm: {pathlib.Path(__file__).parent} has no compiled module _core. In a checkout, run Python from "
        "another folder after `pip install .`, or install with `pip install -e .`"
    )


def _find(path: str) -> str:
    # In an editable installation, CMake installs into another folder than that of the Python files.
    package = importlib.util.find_spec("jaxcomm")
    for folder in (package and package.submodule_search_locations) or ():
        if (found := pathlib.Path(folder, path)).exists():
            return str(found.parent)
    raise RuntimeError(f"jaxcomm was installed without {path}: build it with CMake, as `pip install .` does")


def get_include() -> str:
    """Include folder for compilers (-I): `#include <jaxcomm/version.h>` then works."""
    return _find("include/jaxcomm")


def get_cmake_dir() -> str:
    """Folder for CMake's jaxcomm_ROOT: `find_package(jaxcomm CONFIG)` then defines the target jaxcomm::device."""
    return _find("cmake/jaxcommConfig.cmake")
