"""The installed headers and the CMake package, used by a program outside the tree."""

import pathlib
import subprocess
import sys

import jaxcomm

PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES CXX)
find_package(jaxcomm 0.1 CONFIG REQUIRED)
add_executable(user user.cc)
target_link_libraries(user PRIVATE jaxcomm::device)
message(STATUS "found ${jaxcomm_VERSION}")
"""
SOURCE = """
#include <jaxcomm/version.h>
#include <cstdio>
static_assert(JAXCOMM_VERSION >= 100, "");
int main() { std::printf("%d.%d.%d", JAXCOMM_VERSION_MAJOR, JAXCOMM_VERSION_MINOR, JAXCOMM_VERSION_PATCH); }
"""


def test_cmake_finds_the_headers(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "user.cc").write_text(SOURCE)
    tools = pathlib.Path(sys.executable).parent
    command = (
        (tools / "cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja",
         f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-Djaxcomm_ROOT={jaxcomm.get_cmake_dir()}"),
        (tools / "cmake", "--build", tmp_path / "build"),
        (tmp_path / "build" / "user",),
    )  # fmt: skip
    output = [subprocess.run(part, capture_output=True, text=True, timeout=120, check=True).stdout for part in command]
    assert f"found {jaxcomm.__version__}\n" in output[0]
    assert output[2] == jaxcomm.__version__
    assert (pathlib.Path(jaxcomm.get_include()) / "jaxcomm" / "version.h").exists()
