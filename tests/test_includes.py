"""Includes in ffi/ go one way, and each folder depends on its own libraries only."""

import pathlib
import re

import pytest

FFI = pathlib.Path(__file__).resolve().parent.parent / "ffi"
# Each may include those before it.
CUDA = ["cuda/program", "cuda/kernels", "cuda/nccl", "cuda/runtime", "cuda/xla", "cuda"]
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
FILES = {  # more than their folder; x_py has the bindings of a folder
    "common/attributes.h": {"XLA"},
    "transfer/memory_pool.cc": {"Linux"},
    "cuda/kernels/executor_gin.cu": {"NCCL"},
    "cuda/kernels/inter_node_rows.cu": {"NCCL"},
    "include/jaxcomm/gin.h": {"NCCL"},
}
SOURCES: dict[str, list[pathlib.Path]] = {}  # by folder
for path in sorted(path for path in FFI.rglob("*") if path.suffix in (".h", ".cc", ".cu", ".cuh")):
    SOURCES.setdefault(path.relative_to(FFI).parent.as_posix().removeprefix("."), []).append(path)


def includes(path: pathlib.Path) -> list[tuple[str, pathlib.Path | None]]:
    """Pairs of each included name and the path of that file, None if it is not of this project."""
    names = re.findall(r'^ *# *include +[<"]([^">]+)[">]', path.read_text(), re.M)
    places = [[(path.parent / name).resolve(), FFI / name] for name in names]
    return [(name, next((p for p in both if p.is_file()), None)) for name, both in zip(names, places, strict=True)]


def test_every_folder_is_listed():
    assert set(SOURCES) == set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_includes(folder):
    """They go one way, begin at ffi/ (in the installed headers at jaxcomm/), and name libraries of their folder."""
    for path in SOURCES[folder]:
        own = path.relative_to(FFI)
        allowed = MAY_USE.get(folder, set()) | FILES.get(own.as_posix(), set())
        for name, found in includes(path):
            if found is not None:
                assert found == FFI / name or folder == "include/jaxcomm", f"{own} includes {name}"
                where = found.relative_to(FFI).parent.as_posix().removeprefix(".")
                assert where in {folder, *MAY_INCLUDE[folder]} or found.name == "collectives.def", f"{own}: {name}"
            elif not re.fullmatch(r"[a-z_]+|JAXCOMM_EMULATION", name):  # of the standard library
                of = next((library for library, pattern in LIBRARIES.items() if re.match(pattern, name)), None)
                assert of in allowed or (of == "Python" and own.stem.endswith("_py")), f"{own} includes {name} of {of}"


@pytest.mark.parametrize("folder", ["common", "plan", "sim", "cuda/program"])
def test_no_threads(folder):
    """Their tests are SEQUENTIAL (cmake/NativeTests.cmake): they do not run under ThreadSanitizer."""
    for path in SOURCES[folder]:
        names = {name for name, _ in includes(path)}
        assert not names & {"atomic", "condition_variable", "future", "mutex", "thread"}, path
