"""Eight CPU devices for all tests, meshes over them, and a deadline that names a hanging test."""

import faulthandler
import os
import threading
import zlib

os.environ["JAX_PLATFORMS"] = "cpu"  # must be set before JAX starts a back end
os.environ["JAXCOMM_ALGORITHM"] = "plans"  # the lowering for GPUs is that of jaxcomm's kernels
os.environ["JAXCOMM_CALIBRATION"] = ""  # independent of measurements on this machine
os.environ.setdefault(
    "JAXCOMM_TIMEOUT_S", "20"
)  # a lost rank is detected before XLA's own limit of 40 s ends the process

import jax
import numpy as np
import pytest
import shards
from jax.sharding import AxisType

# tests/multiprocess/test_ops.py runs these tests in several processes at once.
NUM_PROCESSES = int(os.environ["JAX_NUM_PROCESSES"]) if "JAXCOMM_TEST_FOLDER" in os.environ else 1
jax.config.update("jax_num_cpu_devices", 8 // NUM_PROCESSES)
if NUM_PROCESSES > 1:
    jax.distributed.initialize()

DEADLINE_S = 300
LONG_FOLDERS = ("multiprocess", "hosts", "models")
_terminal = None


def pytest_addoption(parser):
    parser.addoption("--size", choices=["default", "full", "stress"], default="default", help="which tests run")
    parser.addoption("--shard", default="", help="i/n: of the tests marked full only the i-th of n parts")


def pytest_collection_modifyitems(config, items):
    size, shard = config.getoption("--size"), config.getoption("--shard")
    part, parts = map(int, shard.split("/")) if shard else (0, 0)

    def runs(item):
        if size != "stress" and item.get_closest_marker("stress"):
            return False
        full = item.get_closest_marker("full") is not None
        if parts:
            machine_code = item.get_closest_marker("machine_code") is not None
            return full and shards.part(item.nodeid, machine_code, parts) == part
        return size != "default" or not full

    # Long files first, as no file is divided: tests of several processes wait, and others use the processors meanwhile.
    items.sort(key=lambda item: item.path.parent.name not in LONG_FOLDERS)
    if left_out := [item for item in items if not runs(item)]:
        items[:] = [item for item in items if runs(item)]
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config):
    config.addinivalue_line("markers", "deadline(seconds): the run ends when this test, or a round of it, takes longer")
    config.addinivalue_line("markers", "full: not in `make test`, but in `make test-all`")
    config.addinivalue_line("markers", "machine_code: full, and needs `make cuda`; all in the first part of --shard")
    config.addinivalue_line("markers", "stress: only in `make stress`")
    global _terminal
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _terminal = os.fdopen(os.dup(2), "w")
    if config.getoption("--size") == "default":
        _compile_quickly()


def _compile_quickly():
    """Compiles without LLVM's optimizations, here and in processes that inherit the environment.

    Most tests compile for longer than they run. The other sizes compile as users do, and the full size runs the op
    tests again, between processes. Without its emitters of fusions, XLA:CPU compiles a step of training in a third of
    the time; it has no others since 0.11.
    """
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11):
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"  # read when the first program compiles


def pytest_sessionstart(session):
    if jax.device_count() < 8:
        pytest.exit(f"these tests need 8 CPU devices, got {jax.device_count()}: jax was started too early", 1)


class Deadline:
    """Prints the test's name and all stacks, then ends the process: XLA can't be interrupted."""

    def __init__(self, name, seconds):
        self._name, self._seconds, self._timer = name, seconds, threading.Timer(0, print)
        self._lock = threading.Lock()

    def restart(self):
        with self._lock:
            self._timer.cancel()
            self._timer = threading.Timer(self._seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def stop(self):
        with self._lock:
            self._timer.cancel()

    def _end(self):
        _terminal.write(f"\n{self._name} took more than {self._seconds} s\n")
        _terminal.flush()
        faulthandler.dump_traceback(_terminal, all_threads=True)
        os._exit(1)


@pytest.fixture(autouse=True)
def _deadline(request):
    marker = request.node.get_closest_marker("deadline")
    deadline = Deadline(request.node.nodeid, marker.args[0] if marker else DEADLINE_S)
    deadline.restart()
    yield deadline
    deadline.stop()


@pytest.fixture
def alive(_deadline):
    """Restarts the deadline; long tests call it in each iteration."""
    return _deadline.restart


@pytest.fixture
def rng(request):
    """Random generator with a seed per test, so that each run has the same data."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def mesh():
    """2 nodes of 4 ranks."""
    return jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.fixture(scope="session")
def line():
    """All 8 ranks along one axis."""
    return jax.make_mesh((8,), ("gpu",), axis_types=(AxisType.Auto,))
