"""Loads the native module and registers its FFI targets."""

import functools

import jax

from jaxcomm import _core
from jaxcomm._config import config

# JAX records it when XLA has compiled a program or has read one from the compilation cache.
_COMPILED = "/jax/core/compile/backend_compile_duration"


def _on_event(event: str, duration_secs: float, **more: str | int) -> None:
    if event == _COMPILED:
        _core.end_program()


@functools.cache
def register() -> None:
    """Registers jaxcomm's FFI targets with the CPU back end, which this starts."""
    num_devices = jax.local_device_count("cpu")
    jax.ffi.register_ffi_type("jaxcomm_call", _core.cpu_state_type(), platform="cpu")
    for name, stages in _core.cpu_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    _core.set_timeout(config().timeout_s)
    _core.start_completer(num_devices)
