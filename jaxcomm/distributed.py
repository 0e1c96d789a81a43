"""Who else takes part: processes find each other through the key-value store of jax.distributed.

Every process publishes a small record when it first needs another one: its node, a handle on its shared memory, a
random token. Once there is a second node, also its network address. Nothing else goes through the store. This is the
only file that uses JAX's private distributed client.
"""

import atexit
import base64
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import os
import pathlib
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxcomm import _compat, _core, _interfaces, _native
from jaxcomm._config import config

_lock = threading.RLock()
_records: dict[int, dict[str, Any]] = {}  # of the processes that this one knows, its own included
_connected: set[int] = set()
_coordinator: str | None = None  # its address, if initialize() has hidden it from JAX


# JAX ends a process that has got no answer from the coordinator for so long. Must fit into 32 bits as milliseconds.
_HEARTBEAT_TIMEOUT_S = 1_000_000


def initialize(coordinator_address: str | None = None, *args: Any, **kwargs: Any) -> None:
    """jax.distributed.initialize() for programs that outlive their processes, process 0 among them.

    JAX ends every process as soon as process 0, which holds the coordination service, has ended. Here its client talks
    to the service through a relay in its own process, which keeps the end of the service from it: collectives with
    process 0 raise, those without it work on. Only what needs the service fails, by its time limit: reaching a process
    for the first time, barriers and other uses of `jax.distributed`. Sets `jax_enable_recoverability`, which does the
    same for the end of other processes. All processes must use this function, or none.

    Args:
      coordinator_address: host:port of process 0; JAX_COORDINATOR_ADDRESS if not given. JAX does not detect it here.
      args, kwargs: as jax.distributed.initialize(), with two other defaults. The service listens on the coordinator's
        address only (coordinator_bind_address). heartbeat_timeout_seconds is 10^6: that long after the end of the
        service, JAX ends the process after all.

    Raises:
      ValueError: no coordinator address.
    """
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    host, colon, port = (address or "").rpartition(":")
    if not colon:
        raise ValueError(f"jaxcomm.distributed.initialize: coordinator_address must be host:port, got {address!r}")
    kwargs.setdefault("coordinator_bind_address", os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address))
    kwargs.setdefault("heartbeat_timeout_seconds", _HEARTBEAT_TIMEOUT_S)
    jax.config.update("jax_enable_recoverability", True)
    global _coordinator
    _coordinator = address
    relay = _core.start_relay(host.strip("[]"), port)
    jax.distributed.initialize(f"unix-abstract:{relay}", *args, **kwargs)
    atexit.register(_part_from_coordinator)  # runs before what JAX has registered


def _part_from_coordinator() -> None:
    """When the process ends, JAX's client would take leave of the service, and wait five minutes for an answer."""
    if not _core.relay_has_lost_server():
        return
    from jax._src import distributed

    state = distributed.global_state
    for name in ("preemption_sync_manager", "client"):
        if (held := getattr(state, name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # never destroyed, for its destructor takes leave too
            setattr(state, name, None)


def register() -> None:
    """Registers jaxcomm's FFI targets with JAX's back ends and connects the processes of a jax.distributed program.

    Lowering a jaxcomm op does this by itself. Call it in a program that only runs what was compiled or exported
    elsewhere (`jax.export.deserialize`, a serialized executable), in all processes at about the same time. Starts the
    CPU back end if that has not happened yet: before that, JAX up to 0.12 registers queued handlers ahead of the types
    that they use, and the back end fails.

    Raises:
      RuntimeError: another process did not show up within JAXCOMM_TIMEOUT_S, can't be reached, or runs another version.
    """
    from jaxcomm import _cost_params  # needs this module

    _native.register()
    with contextlib.suppress(
        ImportError
    ):  # GPUs without jaxcomm's module for them: an error once an op wants to run there
        _native.register_cuda()
    _cost_params.load()
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


def _store(client: Any, key: str, value: str) -> None:
    """JAX sets no limit to this, and without the coordinator there is no answer (initialize())."""
    errors: list[Exception] = []

    def store() -> None:
        try:
            client.key_value_set(key, value)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=store, daemon=True)
    thread.start()
    thread.join(config().timeout_s)
    if thread.is_alive():
        raise RuntimeError(
            f"the coordinator (process 0) did not answer within {config().timeout_s:g} s (JAXCOMM_TIMEOUT_S)"
        )
    if errors:
        raise errors[0]


def _publish(client: Any) -> None:
    """Once; before that, the native module takes every rank for its own."""
    own = jax.process_index()
    if own in _records:
        return
    record = {
        "version": importlib.metadata.version("jaxcomm"),
        "node": node_id(),
        "address": _core.start_process(own, node_id(), config().single_copy),
    }
    _store(client, f"jaxcomm/process/{own}", json.dumps(record))
    _records[own] = record


def _get(client: Any, key: str, timeout_s: float, late: str) -> str:
    """The value of a key, once there is one. `late` goes to standard error after JAXCOMM_WARN_S and each doubling."""
    began, warn_s = time.monotonic(), config().warn_s
    while True:
        waited_s = time.monotonic() - began
        try:
            limit_s = min(warn_s, timeout_s) - waited_s
            return str(client.blocking_key_value_get(f"jaxcomm/{key}", max(math.ceil(limit_s * 1000), 1)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or warn_s >= timeout_s:
                raise
        print(f"warning: jaxcomm: {late} within {warn_s:g} s; an error follows after {timeout_s:g} s", file=sys.stderr)
        warn_s *= 2


def _fetch(client: Any, key: str, process: int) -> str:
    try:
        return _get(client, f"{key}/{process}", config().timeout_s, f"process {process} did not show up")
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"process {process} did not show up within {config().timeout_s:g} s (JAXCOMM_TIMEOUT_S); "
            f"all processes of a mesh must compile its collectives: {str(error).splitlines()[0]}"
        ) from error


def _know(client: Any, processes: Iterable[int]) -> None:
    """Reads the records of other processes."""
    _publish(client)
    own = jax.process_index()
    for process in processes:
        if process in _records:
            continue
        record = json.loads(_fetch(client, "process", process))
        if record["version"] != (ours := _records[own]["version"]):
            raise RuntimeError(f"process {process} runs jaxcomm {record['version']}, process {own} {ours}")
        _records[process] = record


def _wheel_of_ucx() -> str:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return ""
    return str(pathlib.Path(spec.submodule_search_locations[0]) / "lib" / "libucp.so.0")


def agree(key: str, text: str) -> str:
    """What the first process that asked for this key has said. With one process, that is `text`.

    Raises:
      RuntimeError: the key-value store does not answer.
    """
    if not jax.distributed.is_initialized():
        return text
    client = _client()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
        _store(client, f"jaxcomm/{key}", text)
    return hear(key, config().timeout_s)


def hear(key: str, timeout_s: float) -> str:
    """What some process has agreed to, or will within `timeout_s`.

    Raises:
      RuntimeError: none has.
    """
    try:
        return _get(_client(), key, timeout_s, f"no process has said {key}")
    except jax.errors.JaxRuntimeError as error:
        message = f"jaxcomm: no process has said {key} within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise RuntimeError(message) from error


def _network_devices() -> str:
    """UCX's names of the interfaces to use; empty if it shall use all."""
    if (devices := config().network_devices) is not None:
        return "" if devices == "all" else devices
    if _interfaces.has_rdma():
        return ""  # which of them are reached from where is UCX's knowledge
    from jax._src import distributed

    address = _coordinator or getattr(distributed.global_state, "coordinator_address", None)
    return (address and _interfaces.towards(address)) or ""


@functools.cache
def _start_network() -> None:
    """Makes this process reachable from other nodes."""
    client, own = _client(), jax.process_index()
    token = int(agree("token", str(secrets.randbits(64))))
    library, devices = config().ucx_library or "", _network_devices()
    try:
        address = _core.start_network(library, _wheel_of_ucx(), devices, jax.process_count(), token)
    except RuntimeError as error:
        raise RuntimeError(
            f"jaxcomm: there are several nodes, but no network between them: {error}. "
            "`pip install jaxcomm[hosts]` brings a UCX for TCP"
        ) from error
    _store(client, f"jaxcomm/network/{own}", base64.b64encode(address).decode())


def connect(processes: Iterable[int]) -> None:
    """Makes sure that this process can work with the given ones, which must do the same.

    Raises:
      RuntimeError: as register().
    """
    own = jax.process_index()
    with _lock:
        client = _client()
        new = [p for p in processes if p != own and p not in _connected]
        _know(client, new)
        node = _records[own]["node"]
        if any(_records[process]["node"] != node for process in new):
            _start_network()
        for process in new:
            record = _records[process]
            try:
                _core.connect_process(process, record["node"], **record["address"])
                if record["node"] != node:
                    _core.connect_network(process, base64.b64decode(_fetch(client, "network", process)))
            except RuntimeError as error:
                raise RuntimeError(
                    f"process {process} can't be reached from process {own}: {error}. (Processes are of one "
                    f"node if their names are equal, here {node!r}; JAXCOMM_NODE_ID sets another)"
                ) from error
            _connected.add(process)


@functools.cache
def _know_gpu_group(members: tuple[tuple[int, int], ...]) -> None:
    """Gets a group of GPUs, this process's among them, what its own communicator takes: a key of NCCL's.

    The process of the first rank makes it. What waits in it for the others is of that process.
    """
    module, wheel, own = _native.cuda(), _native.nccl_wheel(), jax.process_index()
    name = "nccl/" + hashlib.sha256(repr(members).encode()).hexdigest()
    if members[0][0] == own:
        key = module.unique_id(wheel)
        if any(process != own for process, _ in members):
            _store(_client(), f"jaxcomm/{name}", key.hex())
    else:
        key = bytes.fromhex(hear(name, config().timeout_s))
    module.add_group(wheel, own, list(members), key)


def gpu_groups(mesh: Any, rows: np.ndarray) -> np.ndarray:
    """Process and number there of each GPU, group after group: for XLA that lends no communicators.

    Raises:
      RuntimeError: the process of a group's first rank did not compile the call within JAXCOMM_TIMEOUT_S.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise NotImplementedError("with jaxlib before 0.11.2 jaxcomm needs a mesh of devices, not an AbstractMesh")
    devices = mesh.devices.reshape(-1)
    members = [[(device.process_index, device.local_hardware_id) for device in devices[row]] for row in rows]
    if devices[0].platform == "gpu":  # else the call is only lowered for them
        for group in members:
            if any(process == jax.process_index() for process, _ in group):
                _know_gpu_group(tuple(group))
    return np.array(members, np.int32).reshape(-1)


_windows: dict[int, str] = {}  # "1" or "0", of the processes that this one knows


def windows(mesh: Any) -> bool:
    """Whether XLA is to make windows on its buffers: JAXCOMM_WINDOWS=1 in all processes of the mesh.

    XLA makes them in all processes together and waits without end for one that wants none, before jaxcomm's handlers
    meet. So processes that want them look at the others first; that settings differ is said in the first run, on all
    ranks (ffi/cuda/runtime/communicator.cc). Processes that want none wait for nobody.

    Raises:
      RuntimeError: this process wants windows, and another one did not compile its call within JAXCOMM_TIMEOUT_S.
    """
    wanted = config().windows
    devices = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []
    if jax.process_count() == 1 or not devices or devices[0].platform != "gpu":
        return wanted
    with _lock:
        own = jax.process_index()
        if own not in _windows:
            _windows[own] = str(int(wanted))
            _store(_client(), f"jaxcomm/windows/{own}", _windows[own])
        for process in sorted({device.process_index for device in devices} - _windows.keys()) if wanted else []:
            _windows[process] = _fetch(_client(), "windows", process)
        return wanted and all(_windows[device.process_index] == "1" for device in devices)


def nodes() -> list[list[int]]:
    """The processes of each node, in the order of their first process; all processes must ask."""
    if jax.process_count() == 1:
        return [[0]]
    with _lock:
        _know(_client(), range(jax.process_count()))
    by_name: dict[str, list[int]] = {}
    for process in range(jax.process_count()):
        by_name.setdefault(_records[process]["node"], []).append(process)
    return list(by_name.values())


@dataclasses.dataclass(frozen=True)
class Layout:
    """How replica groups lie on processes and nodes; the same in all processes.

    Attributes:
      processes: of each device, group after group; empty if all are of this process.
      ranks_per_node: ranks of a group that share a node, if each group consists of whole nodes one after the other, all
        with as many ranks; 1 if not; None if every group is of one node.
    """

    processes: np.ndarray
    ranks_per_node: int | None


def ranks_per_node(nodes: Iterable[Any]) -> int:
    """Of one group, given the node of each rank."""
    nodes = list(nodes)
    runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(nodes)) else 1


@functools.cache
def _leave_compilation_cache() -> None:
    """Processes tell launches apart by XLA's run ids, which an executable from the cache numbers differently.

    JAX lets process 0 alone write the cache, and on CPUs process 0 alone finds its entries.
    """
    if _compat.leave_compilation_cache():
        logging.getLogger("jaxcomm").warning(
            "JAX's persistent compilation cache is switched off: collectives between processes of CPUs can't use it"
        )


def layout(mesh: Any, rows: np.ndarray) -> Layout:
    """Of the replica groups `rows`. Connects to the processes that this one will work with."""
    nowhere_else = Layout(np.empty(0, np.int32), None)
    if jax.process_count() == 1:
        return nowhere_else
    if not isinstance(mesh, jax.sharding.Mesh):
        raise NotImplementedError("with several processes jaxcomm needs a mesh of devices, not an AbstractMesh")
    processes = np.array([device.process_index for device in mesh.devices.flat], np.int32)[rows]
    own = jax.process_index()
    if (processes == own).all():
        return nowhere_else
    _leave_compilation_cache()
    with _lock:
        _know(_client(), sorted({int(p) for p in processes.flat}))
    connect(sorted({int(p) for row in processes if own in row for p in row}))
    sizes = {ranks_per_node([_records[int(p)]["node"] for p in row]) for row in processes}
    if sizes == {rows.shape[1]}:
        return Layout(processes.reshape(-1), None)
    return Layout(processes.reshape(-1), sizes.pop() if len(sizes) == 1 else 1)
