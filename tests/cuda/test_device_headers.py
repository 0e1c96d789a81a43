"""The installed headers of the device API: each compiles on its own, and with the example of a user's kernel."""

import os
import pathlib
import re
import subprocess
import sys

import ptxas
import pytest

import jaxcomm

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "ffi" / "include" / "jaxcomm"
HEADERS = sorted(path.name for path in SOURCES.iterdir())
EXAMPLE = ROOT / "examples" / "fused_rmsnorm"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
TOOLS = pathlib.Path(sys.executable).parent


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def toolkit(wheels):
    return wheels / "cu13"


@pytest.fixture
def user(tmp_path):
    """Compiles a header alone, as the first line of a program of somebody else's."""

    def compile(header, suffix, *command):
        source = tmp_path / f"user{suffix}"
        source.write_text(f"#include <jaxcomm/{header}>\n")
        run(*command, "-std=c++17", "-I", jaxcomm.get_include(), "-c", source, "-o", tmp_path / "user.o")

    return compile


def test_what_is_installed_is_what_the_sources_are():
    installed = pathlib.Path(jaxcomm.get_include()) / "jaxcomm"
    assert sorted(path.name for path in installed.iterdir()) == HEADERS
    for header in HEADERS:
        assert (installed / header).read_bytes() == (SOURCES / header).read_bytes(), f"{header}: install jaxcomm anew"


@pytest.mark.parametrize("header", HEADERS)
def test_each_compiles_without_cuda(user, header):
    user(header, ".cc", os.environ.get("CXX", "c++"), "-Wall", "-Wextra", "-Werror")


@pytest.mark.parametrize("header", HEADERS)
def test_each_compiles_with_nvcc(user, toolkit, header):
    user(header, ".cu", toolkit / "bin" / "nvcc", "-arch=sm_90", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra")


def test_the_page_quotes_the_example():
    quoted = re.findall(r"^```cpp\n(.*?)^```$", (ROOT / "docs" / "device-api.md").read_text(), re.DOTALL | re.MULTILINE)
    kernel = {line.strip() for line in (EXAMPLE / "fused_rmsnorm.cuh").read_text().splitlines()}
    assert len(quoted) >= 5
    assert {line.strip() for block in quoted for line in block.splitlines()} <= kernel


def test_the_example_is_built_with_what_is_installed(toolkit, tmp_path):
    """Outside the tree, as its README says; kept reports tell that no kernel spills registers."""
    example, build = tmp_path / "example", tmp_path / "build"
    example.mkdir()
    for source in EXAMPLE.iterdir():
        (example / source.name).write_bytes(source.read_bytes())
    numbers = ";".join(f"{name.removeprefix('sm_')}-real" for name in ARCHITECTURES)
    run(
        TOOLS / "cmake", "-S", example, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
        f"-Djaxcomm_ROOT={jaxcomm.get_cmake_dir()}", f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        f"-DCMAKE_CUDA_ARCHITECTURES={numbers}",
        f"-DCMAKE_CUDA_FLAGS=-L{toolkit / 'lib'} -Xptxas=-v -Werror=all-warnings -Xcompiler=-Wall,-Wextra",
        f"-DCMAKE_CUDA_COMPILER_LAUNCHER={sys.executable};{ROOT / 'cmake' / 'keep_ptxas.py'}",
    )  # fmt: skip
    run(TOOLS / "cmake", "--build", build)
    (report,) = build.rglob("fused_rmsnorm.cu.o.ptxas")
    kernels = ptxas.kernels(report.read_text())
    compiled = sorted((kernel.architecture, "BFloat16" in kernel.name) for kernel in kernels)
    assert compiled == sorted((name, bf16) for name in ARCHITECTURES for bf16 in (False, True))
    ptxas.check_no_spills(kernels)
