"""Types for users and for mypy: the package is typed, and the stubs are those of the native module."""

import ast
import pathlib

import jaxcomm
from jaxcomm import _core


def installed(name):
    """The copies of a file of the package: an editable installation has two folders."""
    found = [path for folder in jaxcomm.__path__ if (path := pathlib.Path(folder, name)).exists()]
    assert found, f"{name} is not installed"
    return found


def names(stub):
    """Public names that a stub defines."""
    found = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and node.module is None:  # from . import x
            found |= {alias.name for alias in node.names}
    return found


def public(module):
    return {name for name in dir(module) if not name.startswith("_")}


def test_the_package_is_typed():
    assert installed("py.typed")


def test_stubs_list_all_names_of_the_native_module():
    for path in installed("_core/__init__.pyi"):
        assert names(path) == public(_core)
    for path in installed("_core/plan.pyi"):
        assert names(path) == public(_core.plan)
