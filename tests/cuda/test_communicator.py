"""Builds and runs test_communicator.cc and test_user_calls.cc, with what `make cuda` has fetched and built."""

import importlib.util
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ["call", "call_program", "communicator", "own_communicators", "program", "user_call", "xla_collectives"]


def test_communicators_on_doubles(build, wheels, tmp_path):
    jaxlib = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent
    headers = (jaxlib / "include", wheels / "nccl/include", wheels / "cu13/include")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += [f'-DJAXCOMM_TEST_EMULATION="{ROOT}/tests/cuda/emulation.h"', f"-I{ROOT}/ffi/include"]
    command += [argument for folder in headers for argument in ("-isystem", folder)]
    command += [ROOT / "tests/cuda/test_communicator.cc", ROOT / "tests/cuda/test_user_calls.cc"]
    # A user's handlers, as they are; their kernel is emulated.
    command += [ROOT / "examples/fused_rmsnorm/handler.cc", ROOT / "ffi/handlers/attributes.cc"]
    command += [ROOT / f"ffi/cuda/{name}.cc" for name in SOURCES]
    command += [build / "libjaxcomm_native.a", "-lpthread", "-ldl", "-o", tmp_path / "test_communicator"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "test_communicator"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 18
