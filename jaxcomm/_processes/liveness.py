"""Processes with GPUs learn of each other's end, over connections to process 0 (ffi/cuda/runtime/liveness.h)."""

import functools
import secrets
import sys
import threading
from types import ModuleType

import jax

from jaxcomm import _native
from jaxcomm._config import config
from jaxcomm._processes import kv_store


def register_cuda() -> bool:
    """As _native.register_cuda. From then on, the end of a process ends the waits of its peers."""
    if not _native.register_cuda():
        return False
    watch()
    return True


@functools.cache
def watch() -> None:
    """Starts the server in process 0 and connects the other processes to it. Does not wait for other processes."""
    if jax.process_count() == 1:
        return
    module = _native.cuda()
    if jax.process_index() == 0:
        token = secrets.token_hex(8)
        kv_store.kv_set("liveness", f"{module.serve_liveness(token)} {token}")
        return
    threading.Thread(target=_join, args=(module, jax.process_index()), daemon=True).start()


def _join(module: ModuleType, process: int) -> None:
    host = (kv_store.coordinator_address() or "").rpartition(":")[0].strip("[]")
    try:
        # Process 0 sets the key when it lowers its first collective.
        found = kv_store.client().blocking_key_value_get("jaxcomm/liveness", int(1000 * config().timeout_s))
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        print(
            f"warning: jaxcomm: process 0 has not started to watch for the end of processes; process {process} finds "
            f"it after JAXCOMM_TIMEOUT_S only: {str(error).splitlines()[0]}",
            file=sys.stderr,
        )
        return
    port, token = found.split()
    module.join_liveness(host, int(port), token, process)
