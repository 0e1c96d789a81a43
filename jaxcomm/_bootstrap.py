"""First contact of processes: each publishes how the others reach it, and connects to those it works with.

A process publishes a small record when it first needs another one: its node, a handle on its shared memory, a random
token. Once there is a second node, it publishes its network address too. Nothing else goes through the key-value store.
"""

import atexit
import base64
import contextlib
import functools
import hashlib
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

from jaxcomm import _compat, _core, _cost_params, _interfaces, _kv_store, _native
from jaxcomm._config import config
from jaxcomm._typing import AnyMesh

_lock = threading.RLock()
_records: dict[int, dict[str, Any]] = {}  # of the processes that have been read, this one's included
_connected: set[int] = set()


def register() -> None:
    """Registers jaxcomm's FFI targets with JAX's back ends and connects the processes of a jax.distributed program.

    Lowering a jaxcomm op does this by itself. Call it in a program that only runs what was compiled or exported
    elsewhere (`jax.export.deserialize`, a serialized executable), in all processes at about the same time. Starts the
    CPU back end if that has not happened yet: before that, JAX up to 0.12 registers queued handlers ahead of the types
    that they use, and the back end fails.

    Raises:
      RuntimeError: another process did not show up within JAXCOMM_TIMEOUT_S, can't be reached, or runs another version.
    """
    _native.register()
    with contextlib.suppress(ImportError):  # GPUs, but no module for them: an error when an op is lowered for them
        _native.register_cuda()
    _cost_params.load()
    if jax.process_count() > 1:
        connect(range(jax.process_count()))


@functools.cache
def warn_if_alone() -> None:
    """Says so where a launcher has started several processes, but this one has not joined them."""
    expected = os.environ.get("JAX_NUM_PROCESSES", "")
    if expected.isdigit() and int(expected) > 1 and _compat.back_ends_have_started() and jax.process_count() == 1:
        seen = jax.device_count()
        print(
            f"warning: jaxcomm: {seen} devices seen, {seen * int(expected)} expected in {expected} processes: call "
            "jaxcomm.distributed.initialize() first",
            file=sys.stderr,
        )


atexit.register(warn_if_alone)  # a script may fail, or end, before it compiles a collective


@functools.cache
def node_id() -> str:
    """Names the node of this process: processes with equal names share memory.

    JAXCOMM_NODE_ID, or a name made of what must agree: boot of the kernel, PID namespace (through which one process
    opens the memory of another) and user.
    """
    if config().node_id is not None:
        return f"JAXCOMM_NODE_ID={config().node_id}"
    return kernel_id()


def kernel_id() -> str:
    """Boot of the kernel, namespaces and user: processes with equal ones see each other's numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "user")]
    return ":".join([boot, *map(str, namespaces), str(os.getuid())])


def _publish_record() -> None:
    """Once per process. Before that, the native module counts every rank as one of this process."""
    own = jax.process_index()
    if own in _records:
        return
    record = {
        "version": importlib.metadata.version("jaxcomm"),
        "node": node_id(),
        "address": _core.start_process(own, node_id(), config().single_copy),
    }
    _kv_store.kv_set(f"process/{own}", json.dumps(record))
    _records[own] = record


def read_records(processes: Iterable[int]) -> None:
    """Reads the records of other processes, which publish theirs when they call this."""
    with _lock:
        _publish_record()
        own = jax.process_index()
        for process in processes:
            if process in _records:
                continue
            record = json.loads(_kv_store.kv_get_of_process("process", process))
            if record["version"] != (ours := _records[own]["version"]):
                raise RuntimeError(f"process {process} runs jaxcomm {record['version']}, process {own} {ours}")
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
    """UCX's names of the interfaces to use; empty if it shall use all."""
    if (devices := config().network_devices) is not None:
        return "" if devices == "all" else devices
    if _core.has_rdma():
        return ""  # which of them are reached from where is UCX's knowledge
    address = _kv_store.coordinator_address()
    return (address and _interfaces.interface_to(address)) or ""


@functools.cache
def _start_network() -> None:
    """Makes this process reachable from other nodes."""
    own = jax.process_index()
    token = int(_kv_store.kv_agree("token", str(secrets.randbits(64))))
    library, devices = config().ucx_library or "", _network_devices()
    try:
        address = _core.start_network(library, _wheel_of_ucx(), devices, jax.process_count(), token)
    except RuntimeError as error:
        raise RuntimeError(
            f"jaxcomm: there are several nodes, but no network between them: {error}. "
            "`pip install jaxcomm[hosts]` brings a UCX for TCP"
        ) from error
    _kv_store.kv_set(f"network/{own}", base64.b64encode(address).decode())


def connect(processes: Iterable[int]) -> None:
    """Makes sure that this process can work with the given ones, which must do the same.

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
                    _core.connect_network(process, base64.b64decode(_kv_store.kv_get_of_process("network", process)))
            except RuntimeError as error:
                raise RuntimeError(
                    f"process {process} can't be reached from process {own}: {error}. (Processes are of one "
                    f"node if their names are equal, here {node!r}; JAXCOMM_NODE_ID sets another)"
                ) from error
            _connected.add(process)


@functools.cache
def join_gpu_group(members: tuple[tuple[int, int], ...]) -> None:
    """Gives NCCL the unique id of the communicator of a group of GPUs, some of them of this process.

    The process of the first rank makes the id and serves its bootstrap.
    """
    module, wheel, own = _native.cuda(), _native.nccl_wheel(), jax.process_index()
    name = "nccl/" + hashlib.sha256(repr(members).encode()).hexdigest()
    if members[0][0] == own:
        key = module.unique_id(wheel)
        if any(process != own for process, _ in members):
            _kv_store.kv_set(name, key.hex())
    else:
        key = bytes.fromhex(_kv_store.kv_wait(name, config().timeout_s))
    module.add_group(wheel, own, list(members), key)


_symmetric_buffers: dict[int, str] = {}  # "1" or "0", of the processes that have been read


def symmetric_buffers(mesh: AnyMesh) -> bool:
    """Whether XLA shall make windows on its buffers: JAXCOMM_SYMMETRIC_BUFFERS=1 in all processes of the mesh.

    XLA makes windows in all processes together, before jaxcomm's handlers run, and waits for all of them without a
    limit. So a process with the setting reads that of the others first. A process without it does not wait. The first
    execution raises on all ranks if settings differ (ffi/cuda/runtime/communicator.cc).

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
            _kv_store.kv_set(f"symmetric_buffers/{own}", _symmetric_buffers[own])
        others = {device.process_index for device in devices} - _symmetric_buffers.keys()
        for process in sorted(others) if wanted else []:
            _symmetric_buffers[process] = _kv_store.kv_get_of_process("symmetric_buffers", process)
        return wanted and all(_symmetric_buffers[device.process_index] == "1" for device in devices)
