"""Imports in jaxcomm/ go one way, without circles, and no folder has more files than a reader can survey."""

import ast
import collections
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxcomm"
# Files and folders, lowest layer first. Each may import those of the layers below it, and files of its own folder.
LAYERS = [
    ["_config", "_dtypes", "_installed", "_measure", "_typing", "run"],
    ["_compat"],
    ["_xla_hierarchical"],
    ["_check", "_native"],
    ["_processes", "_request"],
    ["_cost_params", "_selftest_record"],
    ["recorder"],
    ["_lowering", "_topology", "distributed"],
    ["_ffi", "_pending", "_primitive"],
    ["ops"],
    ["_reshard", "info", "matmul", "moe", "transfer"],
    ["_calibrate", "_explain"],
    ["__init__"],
    ["_selftest_programs", "bench", "simulate"],
    ["selftest"],
]
MOST_ROOMS = 25

LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(node: ast.AST) -> list[str]:
    """The files of jaxcomm that a statement imports, relative to the package."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    found = []
    for name in names:
        package, _, path = name.replace(".", "/").partition("/")
        if package != "jaxcomm" or path.startswith("_core"):  # the native module
            continue
        places = (path, path.rpartition("/")[0])  # the name is a module, or something inside one
        found.append(next(f for p in places for f in (p, f"{p}/__init__".lstrip("/")) if f in FILES))
    return found


def layer(file: str) -> int:
    return LAYER_OF[file.partition("/")[0]]


IMPORTS = {
    file: {name for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)}
    for file, path in FILES.items()
}


@pytest.mark.parametrize("file", FILES)
def test_imports_go_down(file):
    folder = file.partition("/")[0]
    for name in IMPORTS[file]:
        inside = "/" in file and "/" in name and name.partition("/")[0] == folder
        assert inside or layer(name) < layer(file), f"jaxcomm/{file}.py imports jaxcomm/{name}.py"


def test_files_have_layers_without_circles_and_import_at_the_top():
    assert {file.partition("/")[0] for file in FILES} == set(LAYER_OF)
    graphlib.TopologicalSorter(IMPORTS).prepare()
    for file, path in FILES.items():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                assert not any(map(imported, ast.walk(function))), f"{file}: {function.name}"


@pytest.mark.parametrize("tree", ["jaxcomm", "ffi", "tools"])
def test_folders_can_be_surveyed(tree):
    """A source and its header are one room."""
    rooms = collections.defaultdict(set)
    for path in (ROOT / tree).rglob("*"):
        if path.suffix in {".py", ".cc", ".h", ".cu", ".cuh"}:
            rooms[path.parent.relative_to(ROOT).as_posix()].add(path.stem)
    assert not {folder for folder, names in rooms.items() if len(names) > MOST_ROOMS}
