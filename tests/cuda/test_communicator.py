"""Builds and runs tests of communicators on doubles, with what `make cuda` has fetched and built."""

import importlib.util
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [
    "call",
    "call_names",
    "call_program",
    "communicator",
    "exchange",
    "gin",
    "messenger",
    "nodes",
    "own_communicators",
    "packing",
    "program",
    "rounds",
    "stop_word",
    "symmetric_memory",
    "user_call",
    "xla_collectives",
]
# Beside the test's own file. A user's handlers, as they are; their kernel is emulated.
MORE = {"test_communicator": ["tests/cuda/test_user_calls.cc", "examples/fused_rmsnorm/handler.cc"]}


@pytest.mark.parametrize(
    ("name", "num_tests", "warning", "processes"),
    [
        ("test_communicator", 31, "buffers are copied: of the operand: XLA gives no window", 2),
        ("test_between_nodes", 12, "no GIN between nodes: rank", 2),
    ],
)
def test_communicators_on_doubles(build, wheels, tmp_path, name, num_tests, warning, processes):
    jaxlib = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent
    headers = (jaxlib / "include", wheels / "nccl/include", wheels / "cu13/include")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += [f'-DJAXCOMM_TEST_EMULATION="{ROOT}/tests/cuda/emulation.h"', f"-I{ROOT}/ffi/include"]
    command += [argument for folder in headers for argument in ("-isystem", folder)]
    command += [ROOT / f"tests/cuda/{name}.cc", ROOT / "ffi/handlers/attributes.cc"]
    command += [ROOT / more for more in MORE.get(name, [])]
    command += [ROOT / f"ffi/cuda/{name}.cc" for name in SOURCES]
    command += sorted((build / "CMakeFiles" / "jaxcomm_plans.dir").rglob("*.o"))
    command += ["-lpthread", "-ldl", "-o", tmp_path / name]
    built = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / name], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == num_tests
    assert done.stderr.count(warning) == processes  # once in each that has a reason
