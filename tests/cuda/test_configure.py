"""CMake's decisions about the module: JAXCOMM_CUDA, the choice of nvcc and of NCCL's headers."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def configure(tmp_path):
    """Runs CMake as if the system had no nvcc and no NCCL, and returns its status and output."""

    def run(*options, path="", python_path="", **environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "JAXCOMM"))}
        environment = kept | {"PYTHONPATH": str(python_path)} | environment
        environment["PATH"] = f"{path}:{os.environ['PATH']}"
        ignored = {str(pathlib.Path(found).parent) for found in (shutil.which("nvcc"),) if found} - {str(path)}
        ignored |= {"/usr/local/cuda/bin", "/usr/include", "/usr/local/include"}
        cmake = pathlib.Path(sys.executable).parent / "cmake"
        ninja = cmake.parent / "ninja"
        done = subprocess.run(
            (cmake, "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
             f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_IGNORE_PATH={';'.join(ignored)}", *options),
            capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
        return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)

    return run


@pytest.fixture
def nvcc(tmp_path):
    """Makes a compiler that can only print its version."""

    def make(release):
        compiler = tmp_path / "bin" / "nvcc"
        compiler.parent.mkdir()
        compiler.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        compiler.chmod(0o755)
        return compiler

    return make


NO_NVCC = (
    "there is no nvcc: install CUDA 13.0 or later, or set CUDACXX, or see docs/guide/gpu-install.md for the wheels to "
    "install"
)
REQUIRED = "-DJAXCOMM_CUDA=ON"


def test_without_a_compiler(configure):
    status, output = configure()
    assert status == 0
    assert f"-- Without jaxcomm._cuda: {NO_NVCC} --" in output
    assert "CUDA compiler" not in output


@pytest.mark.parametrize(
    ("release", "options", "environment", "expected"),
    [
        (None, (), {}, NO_NVCC),
        (None, (), {"CUDACXX": "/bin/true"}, "/bin/true --version names no release of CUDA"),
        ("12.9", (), {"path": "{folder}"}, "{old}"),
        ("12.9", (), {"CUDACXX": "{nvcc} -ccbin c++"}, "{old}"),
        ("12.9", ("-DCMAKE_CUDA_COMPILER={nvcc}",), {}, "{old}"),
    ],
    ids=["none", "no compiler", "PATH", "CUDACXX", "CMAKE_CUDA_COMPILER"],
)
def test_a_module_that_is_required(release, options, environment, expected, configure, nvcc):
    compiler = nvcc(release) if release else pathlib.Path()
    old = f"{compiler} is of CUDA 12.9; jaxcomm needs 13.0 or later, and a driver of"
    words = {"nvcc": compiler, "folder": compiler.parent, "old": old}
    given = {name: value.format(**words) for name, value in environment.items()}
    status, output = configure(REQUIRED, *(option.format(**words) for option in options), **given)
    assert status != 0
    assert f"JAXCOMM_CUDA=ON, but {expected.format(**words)}" in output


@pytest.mark.parametrize("first", [None, True, False])
def test_nccl_is_missing_or_old(first, configure, nvcc, wheels, tmp_path):
    """`first`: whether an old NCCL is the first of the given folders."""
    (tmp_path / "nccl_device.h").touch()
    (tmp_path / "nccl.h").write_text("#define NCCL_VERSION_CODE 22809\n")
    folders = {None: "", True: tmp_path, False: f"{wheels / 'nccl' / 'include'};{tmp_path}"}[first]
    status, output = configure(f"-DJAXCOMM_NCCL_INCLUDE_DIR={folders}", path=nvcc("13.0").parent)
    missing = "there are no headers of NCCL 2.29.7 or later: install nvidia-nccl-cu13, or set JAXCOMM_NCCL_INCLUDE_DIR"
    old = f"{tmp_path} has headers of NCCL 2.28.9; 2.29.7 or later is needed"
    assert status == 0
    assert f"-- Without jaxcomm._cuda: {missing if first is None else old} --" in output


@pytest.mark.parametrize("older", [pytest.param(None, marks=pytest.mark.full), "12.9", "13.1"])
def test_the_wheels_of_this_python(older, configure, nvcc, wheels):
    """The wheels are used if the system has no compiler or one that is too old."""
    system = nvcc(older) if older else None
    status, output = configure(path=system.parent if system else "", python_path=wheels.parent)
    # CMake then detects that the system's compiler does not work.
    found = f"{system} 13.1" if older == "13.1" else f"{wheels}/cu13/bin/nvcc 13.0"
    assert (status == 0) == (older != "13.1"), output
    assert f"-- With jaxcomm._cuda: {found} for 80-real;90-real;100-real;120; headers of NCCL 23203 in" in output
    assert f"{wheels}/nccl/include" in output
