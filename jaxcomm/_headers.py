"""Folders of the device API's headers, for users' own kernels."""

import pathlib

import jaxcomm


def _find(path: str) -> str:
    # In an editable installation, CMake installs into another folder than that of the Python files.
    for folder in jaxcomm.__path__:
        if (found := pathlib.Path(folder, path)).exists():
            return str(found.parent)
    raise RuntimeError(f"jaxcomm was installed without {path}: build it with CMake, as `pip install .` does")


def get_include() -> str:
    """Include folder for compilers (-I): `#include <jaxcomm/version.h>` then works."""
    return _find("include/jaxcomm")


def get_cmake_dir() -> str:
    """Folder for CMake's jaxcomm_ROOT: `find_package(jaxcomm CONFIG)` then defines the target jaxcomm::device."""
    return _find("cmake/jaxcommConfig.cmake")
