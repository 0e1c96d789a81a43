"""Bootstrap: each process publishes its address and connects to the processes that it works with.

A process publishes a small record when it first needs another process. The record holds its node, a handle on its
shared memory and a random token. If the program spans several nodes, the process publishes its network address too.
"""

import atexit
import base64
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import secrets
import sys
import threading
from collections.abc import Iterable
from typing import Any

import jax

from jaxcomm import _compat, _core
from jaxcomm._config import config
from jaxcomm._processes import interfaces, kv_store
from jaxcomm._typing import AnyMesh

_lock = threading.RLock()
_records: dict[int, dict[str, Any]] = {}  # process -> its record, if read; includes this process
_connected: set[int] = set()


@functools.cache
def warn_if_alone() -> None:
    """Warns if a launcher has started several processes, but this process has not joined them."""
    expected = os.environ.get("JAX_NUM_PROCESSES", "")
    if expected.isdigit() and int(expected) > 1 and _compat.back_ends_have_started() and jax.process_count() == 1:
        seen = jax.device_count()
        print(
            f"warning: jaxcomm: {seen} devices seen, {seen * int(expected)} expected in {expected} processes: call "
            "jaxcomm.distributed.initialize() first",
            file=sys.stderr,
        )


atexit.register(warn_if_alone)  # for scripts that end before they compile a collective


@functools.cache
def node_id() -> str:
    """Returns the name of this process's node. Processes with equal names share memory.

    The name is JAXCOMM_NODE_ID, or kernel_id() if that is not set.
    """
    if config().node_id is not None:
        return f"JAXCOMM_NODE_ID={config().node_id}"
    return kernel_id()


def kernel_id() -> str:
    """Boot id of the kernel, namespaces and user.

    Processes with equal values see each other's process ids and may open each other's memory.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "user")]
    return ":".join([boot, *map(str, namespaces), str(os.getuid())])


def _publish_record() -> None:
    """Publishes the record of this process, once.

    Until then, the native module assumes that all ranks belong to this process.
    """
    own = jax.process_index()
    if own in _records:
        return
    record = {
        "version": importlib.metadata.version("jaxcomm"),
        "node": node_id(),
        "address": _core.start_process(own, node_id(), config().single_copy),
    }
    kv_store.kv_set(f"process/{own}", json.dumps(record))
    _records[own] = record


def read_records(processes: Iterable[int]) -> None:
    """Publishes the record of this process and reads those of other processes, which must call this too."""
    with _lock:
        _publish_record()
        own = jax.process_index()
        for process in processes:
            if process in _records:
                continue
            record = json.loads(kv_store.kv_get_of_process("process", process))
            if record["version"] != (ours := _records[own]["version"]):
                raise RuntimeError(
                    f"process {process} runs jaxcomm {record['version']}, but process {own} runs {ours}: install "
                    "equal versions"
                )
            _records[process] = record


def node_of(process: int) -> str:
    """The node of a process whose record has been read."""
    return str(_records[process]["node"])


def _wheel_of_ucx() -> str:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return ""
    return str(pathlib.Path(spec.submodule_search_locations[0]) / "lib" / "libucp.so.0")


def _network_devices() -> str:
    """UCX's names of the interfaces to use; empty for all."""
    if (devices := config().network_devices) is not None:
        return "" if devices == "all" else devices
    if _core.has_rdma():
        return ""  # UCX itself finds the devices that reach a peer
    address = kv_store.coordinator_address()
    return (address and interfaces.interface_to(address)) or ""


@functools.cache
def _start_network() -> None:
    """Makes this process reachable from other nodes."""
    own = jax.process_index()
    token = int(kv_store.kv_agree("token", str(secrets.randbits(64))))
    library, devices = config().ucx_library or "", _network_devices()
    try:
        address = _core.start_network(library, _wheel_of_ucx(), devices, jax.process_count(), token)
    except RuntimeError as error:
        raise RuntimeError(
            f"jaxcomm: the program spans several nodes, but the network between them can't be opened: {error}. "
            "`pip install jaxcomm[hosts]` installs UCX with TCP"
        ) from error
    kv_store.kv_set(f"network/{own}", base64.b64encode(address).decode())


def connect(processes: Iterable[int]) -> None:
    """Connects this process to the given processes, which must call this too.

    Raises:
      RuntimeError: as register().
    """
    own = jax.process_index()
    with _lock:
        new = [p for p in processes if p != own and p not in _connected]
        read_records(new)
        node = _records[own]["node"]
        if any(_records[process]["node"] != node for process in new):
            _start_network()
        for process in new:
            record = _records[process]
            try:
                _core.connect_process(process, record["node"], **record["address"])
                if record["node"] != node:
                    _core.connect_network(process, base64.b64decode(kv_store.kv_get_of_process("network", process)))
            except RuntimeError as error:
                raise RuntimeError(
                    f"process {process} can't be reached from process {own}: {error}. (Processes with equal node "
                    f"names share a node, here {node!r}; JAXCOMM_NODE_ID sets another name)"
                ) from error
            _connected.add(process)


_symmetric_buffers: dict[int, str] = {}  # process -> its setting, "1" or "0", if read


def symmetric_buffers(mesh: AnyMesh) -> bool:
    """Whether XLA makes windows on its buffers: JAXCOMM_SYMMETRIC_BUFFERS=1 in all processes of the mesh.

    XLA makes the windows in all processes together, before jaxcomm's handlers run. It waits for all processes without
    a limit. So a process that has the setting first reads the settings of the others. A process without it does not
    wait. If settings differ, the first execution raises on all ranks (ffi/cuda/runtime/communicator.cc).

    Raises:
      RuntimeError: this process has the setting, and another one did not compile its call within JAXCOMM_TIMEOUT_S.
    """
    wanted = config().symmetric_buffers
    devices = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []
    if jax.process_count() == 1 or not devices or devices[0].platform != "gpu":
        return wanted
    with _lock:
        own = jax.process_index()
        if own not in _symmetric_buffers:
            _symmetric_buffers[own] = str(int(wanted))
            kv_store.kv_set(f"symmetric_buffers/{own}", _symmetric_buffers[own])
        others = {device.process_index for device in devices} - _symmetric_buffers.keys()
        for process in sorted(others) if wanted else []:
            _symmetric_buffers[process] = kv_store.kv_get_of_process("symmetric_buffers", process)
        return wanted and all(_symmetric_buffers[device.process_index] == "1" for device in devices)


def no_windows(mesh: AnyMesh) -> str | None:
    """Why XLA makes no windows on its buffers; None if it does. The same in all processes of the mesh.

    Raises:
      RuntimeError: as symmetric_buffers.
    """
    if not _compat.has_windows():
        return "XLA has windows on its buffers from jax 0.12 on"
    if not symmetric_buffers(mesh):
        return "JAXCOMM_SYMMETRIC_BUFFERS is not 1 in all processes"
    return None
