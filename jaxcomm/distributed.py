"""Who else takes part: processes find each other through the key-value store of jax.distributed.

Every process publishes a small record when it first needs another one: its node, a handle on its shared memory, a
random token. Nothing else goes through the store. This is the only file that uses JAX's private distributed client.
"""

import functools
import importlib.metadata
import json
import os
import threading
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxcomm import _core, _native
from jaxcomm._config import config

_lock = threading.RLock()
_records: dict[int, dict[str, Any]] = {}  # of the processes that this one knows, its own included


def register() -> None:
    """Registers jaxcomm's FFI targets with the CPU back end and connects the processes of a jax.distributed program.

    Lowering a jaxcomm op does this by itself. Call it in a program that only runs what was compiled or exported
    elsewhere (`jax.export.deserialize`, a serialized executable), in all processes at about the same time. Starts the
    CPU back end if that has not happened yet: before that, JAX up to 0.12 registers queued handlers ahead of the types
    that they use, and the back end fails.

    Raises:
      RuntimeError: another process did not show up within JAXCOMM_TIMEOUT_S, can't be reached, or runs another version.
    """
    _native.register()
    if jax.process_count() > 1:
        connect(range(jax.process_count()))


def _client() -> Any:
    """The client of the key-value store."""
    try:
        from jax._src import distributed

        client = distributed.global_state.client
        missing = [m for m in ("key_value_set", "blocking_key_value_get") if client and not hasattr(client, m)]
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"jaxcomm can't use the key-value store of jax {jax.__version__}: {error}") from error
    if missing:
        raise RuntimeError(f"jaxcomm can't use the key-value store of jax {jax.__version__}: no {', '.join(missing)}")
    if client is None:
        raise RuntimeError("several processes, but jax.distributed.initialize() has not been called")
    return client


@functools.cache
def node_id() -> str:
    """Names the node of this process: processes with equal names share memory.

    JAXCOMM_NODE_ID, or a name made of what must agree: boot of the kernel, PID namespace (through which one process
    opens the memory of another) and user.
    """
    if config().node_id is not None:
        return f"JAXCOMM_NODE_ID={config().node_id}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "user")]
    return ":".join([boot, *map(str, namespaces), str(os.getuid())])


def _key(process: int) -> str:
    return f"jaxcomm/process/{process}"


def _publish(client: Any) -> None:
    """Once; before that, the native module takes every rank for its own."""
    own = jax.process_index()
    if own in _records:
        return
    record = {
        "version": importlib.metadata.version("jaxcomm"),
        "node": node_id(),
        "address": _core.start_process(own, config().single_copy),
    }
    client.key_value_set(_key(own), json.dumps(record))
    _records[own] = record


def _fetch(client: Any, process: int) -> dict[str, Any]:
    try:
        return json.loads(client.blocking_key_value_get(_key(process), int(config().timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"jaxcomm: process {process} did not show up within {config().timeout_s:g} s (JAXCOMM_TIMEOUT_S); "
            f"all processes of a collective must compile it: {str(error).splitlines()[0]}"
        ) from error


def connect(processes: Iterable[int]) -> None:
    """Makes sure that this process can work with the given ones, which must do the same.

    Raises:
      RuntimeError: as register().
      NotImplementedError: a process of another node.
    """
    own = jax.process_index()
    with _lock:
        client = _client()
        _publish(client)
        for process in processes:
            if process in _records:
                continue
            record = _fetch(client, process)
            ours = _records[own]
            if record["version"] != ours["version"]:
                raise RuntimeError(
                    f"jaxcomm: process {process} runs jaxcomm {record['version']}, process {own} {ours['version']}"
                )
            if record["node"] != ours["node"]:
                raise NotImplementedError(
                    f"jaxcomm: processes {own} and {process} are on different nodes ({ours['node']} and "
                    f"{record['node']}); so far all processes must be of one"
                )
            try:
                _core.connect_process(process, **record["address"])
            except RuntimeError as error:
                raise RuntimeError(
                    f"jaxcomm: process {process} can't be reached from process {own}: {error}. Processes that share "
                    "no memory need different JAXCOMM_NODE_IDs"
                ) from error
            _records[process] = record


def processes_of(mesh: Any, rows: np.ndarray) -> np.ndarray:
    """The process of each device of the replica groups `rows`; empty if all are of this one.

    Connects to those that this process will work with.
    """
    if jax.process_count() == 1:
        return np.empty(0, np.int32)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise NotImplementedError("with several processes jaxcomm needs a mesh of devices, not an AbstractMesh")
    processes = np.array([device.process_index for device in mesh.devices.flat], np.int32)[rows]
    own = jax.process_index()
    if (processes == own).all():
        return np.empty(0, np.int32)
    connect(sorted({int(p) for row in processes if own in row for p in row}))
    return processes.reshape(-1)
