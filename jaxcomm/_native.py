"""Loads the native modules and registers their FFI targets."""

import atexit
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
from types import ModuleType
from typing import Any

import jax

from jaxcomm import _core, _errors, _ffi_version
from jaxcomm._config import config

_ffi_version.check(_core.xla_ffi_api_version)

# JAX records it when XLA has compiled a program or has read one from the compilation cache.
_COMPILED = "/jax/core/compile/backend_compile_duration"


def _on_event(event: str, duration_secs: float, **more: str | int) -> None:
    if event == _COMPILED:
        _core.end_program()


@functools.cache
def register() -> None:
    """Registers jaxcomm's FFI targets with the CPU back end, which this starts."""
    num_devices = jax.local_device_count("cpu")
    state_type: Any = _core.cpu_state_type()
    jax.ffi.register_ffi_type("jaxcomm_call", state_type, platform="cpu")
    for name, stages in _core.cpu_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    _core.set_wait_limits(config().timeout_s, config().warn_s)
    _core.start_completer(num_devices)


@functools.cache
def register_cuda() -> bool:
    """Registers jaxcomm's FFI targets with the CUDA back end. False if JAX has none; lowering for GPUs works without.

    Raises:
      ImportError: there is a CUDA back end, but not jaxcomm's module for it.
      RuntimeError: a flag of XLA's makes collectives on GPUs overlap.
    """
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:  # not installed, no GPU, or left out by JAX_PLATFORMS
        return False
    if "xla_gpu_command_buffer_scheduling_mode=CONCURRENT" in os.environ.get("XLA_FLAGS", ""):
        raise RuntimeError(
            "XLA_FLAGS has xla_gpu_command_buffer_scheduling_mode=CONCURRENT: collectives that don't depend on each "
            "other would run at the same time, but share signals and memory"
        )
    module = cuda()
    module.configure(config().timeout_s, config().max_sms, config().node_id or "", config().windows)
    jax.ffi.register_ffi_type("jaxcomm_cuda_call", module.cuda_state_type(), platform="CUDA")
    jax.ffi.register_ffi_type("jaxcomm_user_call", module.user_state_type(), platform="CUDA")
    for name, stages in module.cuda_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    atexit.register(_errors.at_exit, module.failures)
    return True


@functools.cache
def cuda() -> ModuleType:
    """The module for NVIDIA GPUs. It needs no driver to be imported.

    Raises:
      ImportError: it is not installed, does not fit jaxcomm or jaxlib, or cannot be loaded.
    """
    if importlib.util.find_spec("jaxcomm._cuda"):  # built from source
        module = importlib.import_module("jaxcomm._cuda")
    elif importlib.util.find_spec("jaxcomm_cuda13"):
        own, package = (importlib.metadata.version(name) for name in ("jaxcomm", "jaxcomm-cuda13"))
        if own != package:
            raise ImportError(f"jaxcomm-cuda13 {package} needs jaxcomm {package}, found {own}: install equal versions")
        module = importlib.import_module("jaxcomm_cuda13._cuda")
    else:
        raise ImportError("jaxcomm's CUDA module is missing: install jaxcomm-cuda13, or build with JAXCOMM_CUDA=1")
    _ffi_version.check(module.xla_ffi_api_version)
    return module


def nccl_wheel() -> str:
    """NCCL's library in the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13; "" if neither is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (library := pathlib.Path(folder, "nccl", "lib", "libnccl.so.2")).exists():
            return str(library)
    return ""
