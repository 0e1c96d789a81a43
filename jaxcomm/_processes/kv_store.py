"""The key-value store of jax.distributed. Only this file uses JAX's private distributed client."""

import contextlib
import ctypes
import math
import sys
import threading
import time
from typing import Protocol, cast

import jax

from jaxcomm._config import config

hidden_coordinator: str | None = None  # address of the coordinator, if initialize() has given JAX a relay instead


class Client(Protocol):
    """The methods of JAX's client that jaxcomm calls."""

    def key_value_set(self, key: str, value: str) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def client() -> Client:
    """The client of the key-value store.

    Raises:
      RuntimeError: jax.distributed is not initialized, or this version of JAX has another client.
    """
    try:
        from jax._src import distributed

        found = distributed.global_state.client
        missing = [m for m in ("key_value_set", "blocking_key_value_get") if found and not hasattr(found, m)]
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"jaxcomm can't use the key-value store of jax {jax.__version__}: {error}") from error
    if missing:
        raise RuntimeError(f"jaxcomm can't use the key-value store of jax {jax.__version__}: no {', '.join(missing)}")
    if found is None:
        raise RuntimeError("jaxcomm: the key-value store is missing: call jaxcomm.distributed.initialize() first")
    return cast(Client, found)


def num_processes() -> int:
    """Number of processes of jax.distributed. Unlike jax.process_count(), this starts no back end."""
    from jax._src import distributed

    return int(distributed.global_state.num_processes or 1)


def process_id() -> int:
    """Number of this process. Unlike jax.process_index(), this starts no back end."""
    from jax._src import distributed

    return int(distributed.global_state.process_id)


def coordinator_address() -> str | None:
    """host:port of the coordination service, as seen from this process."""
    from jax._src import distributed

    return hidden_coordinator or getattr(distributed.global_state, "coordinator_address", None)


def detach() -> None:
    """Keeps JAX's client from disconnecting at exit.

    If the service has ended, the disconnection waits for five minutes or ends the process with SIGABRT.
    """
    from jax._src import distributed

    state = distributed.global_state
    for name in ("preemption_sync_manager", "client"):
        if (held := getattr(state, name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # never destroyed: the destructor disconnects too
            setattr(state, name, None)


def kv_set(key: str, value: str, timeout_s: float | None = None) -> None:
    """Sets a key. JAX itself waits for the coordinator without a limit, so a thread of its own makes the call.

    Raises:
      RuntimeError: the coordinator did not answer within `timeout_s` (None means JAXCOMM_TIMEOUT_S).
    """
    limit_s = config().timeout_s if timeout_s is None else timeout_s
    kv_client, errors = client(), list[Exception]()

    def store() -> None:
        try:
            kv_client.key_value_set(f"jaxcomm/{key}", value)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=store, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise RuntimeError(f"the coordinator (process 0) did not answer within {limit_s:g} s (JAXCOMM_TIMEOUT_S)")
    if errors:
        raise errors[0]


def kv_get(key: str, timeout_s: float, late: str) -> str:
    """Waits for a key and returns its value.

    Prints the warning `late` to standard error after JAXCOMM_WARN_S, and again each time the wait has doubled.
    """
    kv_client, began, warn_s = client(), time.monotonic(), config().warn_s
    while True:
        waited_s = time.monotonic() - began
        try:
            limit_s = min(warn_s, timeout_s) - waited_s
            return str(kv_client.blocking_key_value_get(f"jaxcomm/{key}", max(math.ceil(limit_s * 1000), 1)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or warn_s >= timeout_s:
                raise
        print(f"warning: jaxcomm: {late} within {warn_s:g} s; an error follows after {timeout_s:g} s", file=sys.stderr)
        warn_s *= 2


def kv_get_of_process(key: str, process: int) -> str:
    """Waits for the value that a process publishes under its own number.

    Raises:
      RuntimeError: the process did not publish it within JAXCOMM_TIMEOUT_S.
    """
    try:
        return kv_get(f"{key}/{process}", config().timeout_s, f"process {process} did not connect")
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"process {process} did not connect within {config().timeout_s:g} s (JAXCOMM_TIMEOUT_S); "
            f"all processes of a mesh must compile its collectives: {str(error).splitlines()[0]}"
        ) from error


def kv_wait(key: str, timeout_s: float) -> str:
    """Waits for a key that any process may set, and returns its value.

    Raises:
      RuntimeError: no process has set the key within `timeout_s`.
    """
    try:
        return kv_get(key, timeout_s, f"no process has set {key}")
    except jax.errors.JaxRuntimeError as error:
        message = f"jaxcomm: no process has set {key} within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise RuntimeError(message) from error


def kv_agree(key: str, text: str) -> str:
    """Returns the same text in all processes: that of the first process that calls this with the key.

    In a program of one process, returns `text`.

    Raises:
      RuntimeError: the key-value store does not answer.
    """
    if not jax.distributed.is_initialized():
        return text
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
        kv_set(key, text)
    return kv_wait(key, config().timeout_s)
