"""Builds and runs test_gin_host.cc, with the headers that `make cuda` has fetched."""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def test_gin_on_doubles(build, wheels, tmp_path):
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT}/ffi/include", "-isystem", wheels / "nccl/include", "-isystem", wheels / "cu13/include"]
    command += [ROOT / "tests/cuda/test_gin_host.cc", ROOT / "ffi/cuda/gin.cc"]
    built = subprocess.run([*command, "-o", tmp_path / "test"], capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "test"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 2
