"""The programs that test and time kernels on a GPU pass the front ends of nvcc and of the host compiler.

The default size compiles the tests in emulation, and the kernels with nvcc (`make cuda`).
"""

import json
import pathlib
import shlex
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full
ROOT = pathlib.Path(__file__).parents[2]
TOOLS = pathlib.Path(sys.executable).parent
TESTS = [f"tests/cuda/test_{name}.cc" for name in ("executor", "ll", "example", "smoke")]
TESTS += ["tests/cuda/gpu/rows.cu"]
BENCHMARKS = [f"benchmarks/gpu/{name}.cu" for name in ("virtual_ranks", "ll", "nccl_ranks")]


def run(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


@pytest.fixture(scope="module")
def programs(wheels, tmp_path_factory):
    """The commands of CMake for each source, and the folder in which they run."""
    folder = tmp_path_factory.mktemp("programs")
    toolkit = wheels / "cu13"
    done = run(
        TOOLS / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
        "-DJAXCOMM_GPU_TESTS=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}", f"-DCMAKE_CUDA_FLAGS=-L{toolkit / 'lib'}",
        f"-DJAXCOMM_NCCL_INCLUDE_DIR={wheels / 'nccl' / 'include'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((folder / "compile_commands.json").read_text())
    commands = {
        str(pathlib.Path(entry["file"]).resolve().relative_to(ROOT)): shlex.split(entry["command"])
        for entry in entries
        if "nvcc" in entry["command"]
    }

    return commands, folder


def test_no_other_program_is_there(programs):
    assert sorted(source for source in programs[0] if not source.startswith("ffi/")) == sorted(TESTS + BENCHMARKS)


@pytest.mark.parametrize("source", TESTS + BENCHMARKS)
def test_it_compiles(programs, source):
    """Without optimisation."""
    commands, folder = programs
    quick = ("-fdevice-syntax-only", "-Xcompiler=-O0", "-o", folder / f"{pathlib.Path(source).stem}.o")
    done = run(*commands[source], *quick, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
