"""Includes in ffi/ go one way, and each folder depends on its own libraries only."""

import pathlib
import re

import pytest

FFI = pathlib.Path(__file__).resolve().parent.parent / "ffi"
# Each may include those before it.
CUDA = [
    "cuda/program",
    "cuda/kernels",
    "cuda/nccl",
    "cuda/runtime",
    "cuda/xla",
    "cuda",
]
CPU = ["common", "plan", "plan/algorithms", "sim", "recorder", "transport", "cpu", "transfer", "handlers"]
MAY_INCLUDE = {
    "include/jaxcomm": set(),  # installed: it stands alone
    **{folder: set(CPU[:i]) for i, folder in enumerate(CPU)},
    **{folder: {"common", "plan", "recorder", "include/jaxcomm", *CUDA[:i]} for i, folder in enumerate(CUDA)},
    "": set(CPU),  # the module of the CPU
}
MAY_INCLUDE["recorder"] = {"common"}
MAY_INCLUDE["cpu"].add("include/jaxcomm")  # arithmetic of all element types
LIBRARIES = {
    "CUDA": r"cuda_|cuda/atomic|library_types",
    "NCCL": r"nccl",
    "XLA": r"xla/",
    "Python": r"nanobind/",
    "Linux": r"(sys|arpa|linux|netinet)/|(dlfcn|fcntl|link|netdb|poll|sched|unistd)\.h",
    "x86": r"[a-z]mmintrin\.h",
}
MAY_USE = {
    "recorder": {"Linux"},
    "transport": {"Linux"},
    "cpu": {"Linux", "x86"},
    "handlers": {"XLA"},
    "": {"XLA", "Python"},
    "cuda/kernels": {"CUDA"},
    "cuda/nccl": {"CUDA", "NCCL", "Linux"},
    "cuda/runtime": {"CUDA", "NCCL", "Linux"},
    "cuda/xla": {"CUDA", "NCCL", "XLA"},
    "cuda": {"CUDA", "NCCL", "XLA", "Python"},
    "include/jaxcomm": {"CUDA", "XLA"},
}
FILES = {  # more than their folder
    "common/attributes.h": {"XLA"},
    "plan/plan_py.h": {"Python"},
    "plan/plan_py.cc": {"Python"},
    "plan/resolve_py.cc": {"Python"},
    "sim/sim_py.h": {"Python"},
    "sim/sim_py.cc": {"Python"},
    "transfer/memory_pool.cc": {"Linux"},
    "transfer/transfer_py.h": {"Python"},
    "transfer/transfer_py.cc": {"Python"},
    "cuda/kernels/executor_gin.cu": {"NCCL"},
    "cuda/kernels/inter_node_rows.cu": {"NCCL"},
    "include/jaxcomm/gin.h": {"NCCL"},
}
SOURCES = sorted(path for path in FFI.rglob("*") if path.suffix in (".h", ".cc", ".cu", ".cuh"))


def folder_of(path: pathlib.Path) -> str:
    return path.relative_to(FFI).parent.as_posix().removeprefix(".")


def includes(path: pathlib.Path) -> list[tuple[str, pathlib.Path | None]]:
    """Pairs of each included name and the path of that file, None if it is not of this project."""
    names = re.findall(r'^ *# *include +[<"]([^">]+)[">]', path.read_text(), re.M)
    places = [[(path.parent / name).resolve(), FFI / name] for name in names]
    return [(name, next((p for p in both if p.is_file()), None)) for name, both in zip(names, places, strict=True)]


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_includes_go_one_way(folder):
    files = [path for path in SOURCES if folder_of(path) == folder]
    assert files
    for path in files:
        for name, found in includes(path):
            if found is None or found.name == "collectives.def" or folder_of(found) == folder:
                continue
            assert folder_of(found) in MAY_INCLUDE[folder], f"{path.relative_to(FFI)} includes {name}"


def test_every_folder_is_listed():
    assert {folder_of(path) for path in SOURCES} == set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_a_folder_includes_its_libraries_only(folder):
    for path in SOURCES:
        if folder_of(path) != folder:
            continue
        allowed = MAY_USE.get(folder, set()) | FILES.get(path.relative_to(FFI).as_posix(), set())
        for name, found in includes(path):
            if found is not None or re.fullmatch(r"[a-z_]+|JAXCOMM_EMULATION", name):  # ours, or the standard library
                continue
            of = [library for library, pattern in LIBRARIES.items() if re.match(pattern, name)]
            assert of, f"{path.relative_to(FFI)} includes {name}, which is of no known library"
            assert of[0] in allowed, f"{path.relative_to(FFI)} includes {name} of {of[0]}"


@pytest.mark.parametrize("folder", ["common", "plan", "sim", "cuda/program"])
def test_no_threads(folder):
    """Their tests are SEQUENTIAL (cmake/NativeTests.cmake): they do not run under ThreadSanitizer."""
    for path in SOURCES:
        if folder_of(path) == folder:
            names = {name for name, _ in includes(path)}
            assert not names & {"atomic", "condition_variable", "future", "mutex", "thread"}, path.relative_to(FFI)


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE.keys() - {"include/jaxcomm"}))
def test_paths_begin_at_ffi(folder):
    """Every include shows the folder of its file. The installed headers have the prefix jaxcomm/ instead."""
    for path in SOURCES:
        if folder_of(path) == folder:
            for name, found in includes(path):
                assert found is None or found == FFI / name, f"{path.relative_to(FFI)} includes {name}"
