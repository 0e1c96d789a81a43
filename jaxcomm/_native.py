"""Loads the native module and registers its FFI targets."""

import functools

import jax

from jaxcomm import _core
from jaxcomm._config import config


@functools.cache
def register() -> None:
    """Registers jaxcomm's FFI targets with the CPU back end.

    Lowering a jaxcomm op does this by itself. Call it in a program that only runs what was compiled or exported
    elsewhere (`jax.export.deserialize`, a serialized executable). Starts the CPU back end if that has not happened yet:
    before that, JAX up to 0.12 registers queued handlers ahead of the types that they use, and the back end fails.
    """
    num_devices = jax.local_device_count("cpu")
    jax.ffi.register_ffi_type("jaxcomm_call", _core.cpu_state_type(), platform="cpu")
    for name, stages in _core.cpu_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    _core.set_timeout(config().timeout_s)
    _core.start_completer(num_devices)
