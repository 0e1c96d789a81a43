"""The key-value store of jax.distributed. The only file that uses JAX's private distributed client."""

import contextlib
import ctypes
import math
import sys
import threading
import time
from typing import Protocol, cast

import jax

from jaxcomm._config import config

hidden_coordinator: str | None = None  # its address, if jaxcomm.distributed.initialize() has hidden it from JAX


class Client(Protocol):
    """The methods of JAX's client that jaxcomm calls."""

    def key_value_set(self, key: str, value: str) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def client() -> Client:
    """The client of the key-value store.

    Raises:
      RuntimeError: there is none, or this version of JAX has another one.
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
        raise RuntimeError("several processes, but jaxcomm.distributed.initialize() has not been called")
    return cast(Client, found)


def num_processes() -> int:
    """Processes of the initialized jax.distributed; unlike jax.process_count(), this starts no back end."""
    from jax._src import distributed

    return int(distributed.global_state.num_processes or 1)


def process_id() -> int:
    """As jax.process_index(), without starting back ends."""
    from jax._src import distributed

    return int(distributed.global_state.process_id)


def coordinator_address() -> str | None:
    """host:port of the coordination service, as this process reaches it."""
    from jax._src import distributed

    return hidden_coordinator or getattr(distributed.global_state, "coordinator_address", None)


def detach() -> None:
    """Keeps JAX's client as it is when the process ends.

    Its disconnection waits five minutes for a service that has ended, or ends the process by SIGABRT.
    """
    from jax._src import distributed

    state = distributed.global_state
    for name in ("preemption_sync_manager", "client"):
        if (held := getattr(state, name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # never destroyed, for its destructor disconnects too
            setattr(state, name, None)


def kv_set(key: str, value: str, timeout_s: float | None = None) -> None:
    """Sets a key within JAXCOMM_TIMEOUT_S or `timeout_s`. JAX itself waits for the coordinator without a limit."""
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
    """The value of a key, once it is set. `late` goes to standard error after JAXCOMM_WARN_S and each doubling."""
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
    """The value that a process sets for itself.

    Raises:
      RuntimeError: it did not within JAXCOMM_TIMEOUT_S.
    """
    try:
        return kv_get(f"{key}/{process}", config().timeout_s, f"process {process} did not show up")
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"process {process} did not show up within {config().timeout_s:g} s (JAXCOMM_TIMEOUT_S); "
            f"all processes of a mesh must compile its collectives: {str(error).splitlines()[0]}"
        ) from error


def kv_wait(key: str, timeout_s: float) -> str:
    """The value of a key that any process sets within `timeout_s`.

    Raises:
      RuntimeError: none has.
    """
    try:
        return kv_get(key, timeout_s, f"no process has set {key}")
    except jax.errors.JaxRuntimeError as error:
        message = f"jaxcomm: no process has set {key} within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise RuntimeError(message) from error


def kv_agree(key: str, text: str) -> str:
    """The same text in all processes: that of the first one that calls this with the key. Alone, `text`.

    Raises:
      RuntimeError: the key-value store does not answer.
    """
    if not jax.distributed.is_initialized():
        return text
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
        kv_set(key, text)
    return kv_wait(key, config().timeout_s)
