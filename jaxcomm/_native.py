"""Loads the native modules and registers their FFI targets."""

import atexit
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jaxlib

from jaxcomm import _compat, _core
from jaxcomm._config import config


def jaxlib_version(header: str, major: str, minor: str) -> tuple[int, int] | None:
    """The version that a header of the installed jaxlib defines; None if jaxlib has no such header."""
    path = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", header)
    if not path.exists():
        return None
    text = path.read_text()
    found = [re.search(rf"define {name} +(\d+)", text) for name in (major, minor)]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def ffi_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib; None if its header does not define one."""
    return jaxlib_version("c_api.h", "XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR")


def check_ffi_version(built: tuple[int, int]) -> None:
    """Compares the FFI version that a native module was built for with the installed jaxlib's.

    XLA accepts handlers of its own version or an older one; it supports each version for at least 12 months
    (xla/ffi/api/c_api.h).

    Raises:
      ImportError: the module was built for a newer version.
    """
    installed = ffi_version()
    if installed is not None and built > installed:
        jaxlib = importlib.metadata.version("jaxlib")
        raise ImportError(
            f"jaxcomm was built for XLA FFI {built[0]}.{built[1]}, but jaxlib {jaxlib} has {installed[0]}."
            f"{installed[1]}: upgrade jax and jaxlib, or build jaxcomm again with this jaxlib installed"
        )


check_ffi_version(_core.xla_ffi_api_version)

_failures: Callable[[], list[str]] = list  # that of the module for GPUs, once its targets are registered

# JAX records this event twice on the thread that compiles a program. It records a scalar before XLA compiles the
# program or reads it from the compilation cache. It records a duration afterwards, also if the compilation fails.
_COMPILE = "/jax/core/compile/backend_compile_duration"


class _Compilations:
    """Serializes compilations on CPUs if there are several processes.

    Call sites are numbered until the compilation of their program ends. XLA creates them on a thread of its own. The
    end of another program's compilation would restart the numbers, and two call sites would get the same number.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._own = threading.local()

    def begin(self, event: str, value: float, **more: str | int) -> None:
        if event != _COMPILE or jax.process_count() == 1 or jax.default_backend() != "cpu":
            return
        depth = getattr(self._own, "depth", 0)
        if depth == 0 and not self._turn.acquire(timeout=config().timeout_s):
            return  # one compilation that exceeds the limit must not block the others
        self._own.depth = depth + 1

    def end(self, event: str, duration_secs: float, **more: str | int) -> None:
        if event != _COMPILE:
            return
        depth = getattr(self._own, "depth", 0)
        if depth <= 1:
            _core.end_program()
        if depth > 0:
            self._own.depth = depth - 1
        if depth == 1:
            self._turn.release()


@functools.cache
def register() -> None:
    """Registers jaxcomm's FFI targets with the CPU back end. Starts the back end."""
    num_devices = jax.local_device_count("cpu")
    state_type: Any = _core.cpu_state_type()
    jax.ffi.register_ffi_type("jaxcomm_call", state_type, platform="cpu")
    for name, stages in _core.cpu_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    compilations = _Compilations()
    jax.monitoring.register_scalar_listener(compilations.begin)
    jax.monitoring.register_event_duration_secs_listener(compilations.end)
    _core.set_wait_limits(config().timeout_s, config().warn_s)
    _core.start_completion_pool(num_devices)


@functools.cache
def register_cuda() -> bool:
    """Registers jaxcomm's FFI targets with the CUDA back end. Returns False if JAX has none.

    The lowering for GPUs works without a CUDA back end.

    Raises:
      ImportError: JAX has a CUDA back end, but jaxcomm's CUDA module is missing, or jaxlib or the driver is too old.
      RuntimeError: an XLA flag makes collectives on GPUs overlap.
    """
    global _failures
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:  # not installed, no GPU, or left out by JAX_PLATFORMS
        return False
    if "xla_gpu_command_buffer_scheduling_mode=CONCURRENT" in os.environ.get("XLA_FLAGS", ""):
        raise RuntimeError(
            "XLA_FLAGS has xla_gpu_command_buffer_scheduling_mode=CONCURRENT: independent collectives would run at the "
            "same time, but they share signals and memory. Remove the flag"
        )
    limit = re.findall(r"xla_gpu_experimental_parallel_collective_overlap_limit=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if limit and int(limit[-1]) > 1:
        raise RuntimeError(
            "XLA_FLAGS has xla_gpu_experimental_parallel_collective_overlap_limit of more than 1: started collectives "
            "would run at the same time, but they share signals and memory. Remove the flag"
        )
    if not _compat.provides_communicators():
        raise ImportError(
            "jaxcomm needs jax, jaxlib and JAX's CUDA plugin 0.11.2 or later on GPUs, found jaxlib "
            f"{jaxlib.__version__}: upgrade them, or pass algorithm='xla'"
        )
    module = cuda()
    if problem := driver_problem(module):
        raise ImportError(f"jaxcomm's CUDA module can't run: {problem}, or pass algorithm='xla'")
    processes = jax.process_index(), jax.process_count()
    settings = config()
    node_id = settings.node_id or ""
    module.use_recorder(_core.recorder.address())
    module.configure(
        settings.timeout_s, settings.max_sms, node_id, settings.symmetric_buffers, *processes, settings.bulk_copy
    )
    jax.ffi.register_ffi_type("jaxcomm_cuda_call", module.cuda_state_type(), platform="CUDA")
    jax.ffi.register_ffi_type("jaxcomm_moe_one_shot", module.moe_one_shot_state_type(), platform="CUDA")
    jax.ffi.register_ffi_type("jaxcomm_user_call", module.user_state_type(), platform="CUDA")
    for name, stages in module.cuda_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    _failures = module.failures
    module.start_watchdog()
    # After JAX's own handler, so threads end before CUDA does. An uncaught exception is a failure for other processes.
    atexit.register(lambda: module.end_threads(not hasattr(sys, "last_value")))
    return True


@functools.cache
def cuda() -> ModuleType:
    """The module for NVIDIA GPUs. Its import needs no driver.

    Raises:
      ImportError: the module is missing, cannot be loaded, or was built for another jaxcomm or jaxlib.
    """
    if importlib.util.find_spec("jaxcomm._cuda"):  # built from source
        module = importlib.import_module("jaxcomm._cuda")
    elif importlib.util.find_spec("jaxcomm_cuda13"):
        own, package = (importlib.metadata.version(name) for name in ("jaxcomm", "jaxcomm-cuda13"))
        if own != package:
            raise ImportError(f"jaxcomm-cuda13 {package} needs jaxcomm {package}, found {own}: install equal versions")
        module = importlib.import_module("jaxcomm_cuda13._cuda")
    else:
        raise ImportError(
            "jaxcomm's CUDA module is missing: install jaxcomm-cuda13, or build with JAXCOMM_CUDA=1 (driver 580 or "
            "later). There is none for CUDA 12"
        )
    check_ffi_version(module.xla_ffi_api_version)
    return module


_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def kernel_driver() -> str:
    """Version of NVIDIA's kernel driver; empty if there is none."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def driver_problem(module: ModuleType) -> str:
    """Why the driver does not run code of the module's CUDA version; empty if it does."""
    driver, built = module.driver_version(), module.built()["cuda"]
    if driver == 0:
        return "there is no NVIDIA driver"
    if driver // 1000 >= built // 1000:
        return ""
    of_driver, of_module = (f"{code // 1000}.{code % 1000 // 10}" for code in (driver, built))
    return f"the driver serves CUDA {of_driver}, jaxcomm was built with {of_module}: install a newer driver"


def nccl_wheel() -> str:
    """Path of NCCL in the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13; "" if neither is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (library := pathlib.Path(folder, "nccl/lib/libnccl.so.2")).exists():
            return str(library)
    return ""


def check() -> None:
    """Raises if a collective on a GPU of this process has failed.

    XLA raises an error of its own, such as CUDA_ERROR_LAUNCH_FAILED, where the program waits for a result. This
    function raises an error that names the operation, the call site, the rank and its peer. On CPUs, the collectives
    themselves raise.

    Raises:
      RuntimeError: at least one collective has failed; the text has one line for each communicator.
    """
    if found := _failures():
        raise RuntimeError("\n".join(f"jaxcomm: {failure}" for failure in found))
