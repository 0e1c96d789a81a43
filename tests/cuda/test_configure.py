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


def test_without_a_compiler(configure):
    status, output = configure()
    assert status == 0
    assert f"-- Without jaxcomm._cuda: {NO_NVCC} --" in output
    assert "CUDA compiler" not in output
    status, output = configure("-DJAXCOMM_CUDA=ON")
    assert status != 0
    assert f"JAXCOMM_CUDA=ON, but {NO_NVCC}" in output


def test_compiler_without_nccl(configure, nvcc):
    status, output = configure(path=nvcc("13.0").parent)
    assert status == 0
    assert (
        "-- Without jaxcomm._cuda: there are no headers of NCCL 2.29.7 or later: install nvidia-nccl-cu13, or "
        "set JAXCOMM_NCCL_INCLUDE_DIR --"
    ) in output


@pytest.mark.parametrize("given", ["PATH", "CUDACXX", "CMAKE_CUDA_COMPILER"])
def test_old_compiler(given, configure, nvcc):
    old = nvcc("12.9")
    options = ["-DJAXCOMM_CUDA=ON"]
    more = {}
    if given == "PATH":
        more["path"] = old.parent
    elif given == "CUDACXX":
        more["CUDACXX"] = f"{old} -ccbin c++"
    else:
        options.append(f"-DCMAKE_CUDA_COMPILER={old}")
    status, output = configure(*options, **more)
    assert status != 0
    assert f"JAXCOMM_CUDA=ON, but {old} is of CUDA 12.9; jaxcomm needs 13.0 or later, and a driver of" in output


def test_not_a_compiler(configure):
    status, output = configure("-DJAXCOMM_CUDA=ON", CUDACXX="/bin/true")
    assert status != 0
    assert "JAXCOMM_CUDA=ON, but /bin/true --version names no release of CUDA" in output


@pytest.mark.parametrize("first", [True, False])
def test_old_nccl(first, configure, nvcc, wheels, tmp_path):
    (tmp_path / "nccl_device.h").touch()
    (tmp_path / "nccl.h").write_text("#define NCCL_VERSION_CODE 22809\n")
    folders = tmp_path if first else f"{wheels / 'nccl' / 'include'};{tmp_path}"
    status, output = configure(f"-DJAXCOMM_NCCL_INCLUDE_DIR={folders}", path=nvcc("13.0").parent)
    assert status == 0
    assert f"-- Without jaxcomm._cuda: {tmp_path} has headers of NCCL 2.28.9; 2.29.7 or later is needed --" in output


@pytest.mark.parametrize("older", [pytest.param(None, marks=pytest.mark.full), "12.9"])
def test_the_wheels_of_this_python(older, configure, nvcc, wheels):
    """The wheels are used if the system has no compiler or one that is too old."""
    status, output = configure(path=nvcc(older).parent if older else "", python_path=wheels.parent)
    assert status == 0, output
    assert (
        f"-- With jaxcomm._cuda: {wheels}/cu13/bin/nvcc 13.0 for 80-real;90-real;100-real;120; headers of NCCL"
        in output
    )
    assert f"23203 in {wheels}/nccl/include --" in output


def test_without_the_cuda_module(configure, wheels):
    status, output = configure("-DJAXCOMM_CUDA=OFF", python_path=wheels.parent)
    assert status == 0
    assert "jaxcomm._cuda" not in output


def test_the_systems_compiler_comes_first(configure, nvcc, wheels):
    system = nvcc("13.1")
    _, output = configure("-DJAXCOMM_CUDA=ON", path=system.parent, python_path=wheels.parent)
    # CMake then detects that this compiler does not work.
    assert f"-- With jaxcomm._cuda: {system} 13.1 for 80-real;90-real;100-real;120; headers of NCCL 23203" in output
