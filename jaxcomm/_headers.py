"""Paths of the device API's headers, for programs with their own kernels."""

import pathlib

import jaxcomm


def _find(path: str) -> str:
    # In an editable installation, what CMake has installed is in another folder than the Python files.
    for folder in jaxcomm.__path__:
        if (found := pathlib.Path(folder, path)).exists():
            return str(found.parent)
    raise RuntimeError(f"jaxcomm has been installed without {path}: build it with CMake, as `pip install .` does")


def get_include() -> str:
    """Returns the folder for the compiler's -I, so that `#include <jaxcomm/version.h>` works."""
    return _find("include/jaxcomm")


def get_cmake_dir() -> str:
    """Returns the folder for CMake's jaxcomm_ROOT. `find_package(jaxcomm CONFIG)` defines jaxcomm::device."""
    return _find("cmake/jaxcommConfig.cmake")
