"""Programs of several processes: initialize() joins them, register() prepares executables from elsewhere."""

import atexit
import contextlib
import functools
import ipaddress
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcomm import _compat, _core, _cost_params, _native
from jaxcomm._processes import bootstrap, kv_store, launchers, liveness
from jaxcomm.recorder import _start as recorder

__all__ = ["initialize", "register"]

# JAX ends a process that has had no answer from the coordinator for this time. Milliseconds must fit into 32 bits.
_HEARTBEAT_TIMEOUT_S = 1_000_000


def register() -> None:
    """Registers jaxcomm's FFI targets with JAX's back ends and connects the processes of a jax.distributed program.

    The lowering of a jaxcomm op does this for the processes of its mesh. Call this function in a program that only runs
    executables from elsewhere (`jax.export.deserialize`, a serialized executable). All processes must call it at about
    the same time. It starts the CPU back end: if targets are registered earlier, JAX up to 0.12 registers the handlers
    before the types that they use, and the back end fails.

    Raises:
      RuntimeError: another process did not connect within JAXCOMM_TIMEOUT_S, is unreachable, or runs another version.
    """
    _native.register()
    recorder.start()
    with contextlib.suppress(ImportError):  # GPUs without the CUDA module: the lowering of an op raises
        liveness.register_cuda()
    _cost_params.load()
    if jax.process_count() > 1:
        bootstrap.connect(range(jax.process_count()))


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    **options: Any,
) -> int:
    """Joins the processes of this program, under any launcher of docs/guide/clusters.md. Does nothing if alone.

    Call it in all processes before JAX starts its back ends. It calls `jax.distributed.initialize()` with the arguments
    that the launcher's environment variables imply. Arguments of this function override `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and `JAX_LOCAL_DEVICE_IDS`. These variables override those of torchrun, Open
    MPI, MPICH and Slurm. On Cloud TPUs, JAX itself detects everything.

    The program survives the death of any process, also of process 0, which holds the coordination service. (JAX alone
    ends every process after process 0 has ended.) For this, JAX's client connects to the service through a relay in its
    own process, whose connection stays open. Collectives with a dead process raise, and collectives without it
    continue. After the death of process 0, only uses of the service fail, after their time limits: barriers of
    `jax.distributed`, and the first connection between two processes. This function sets `jax_enable_recoverability`.
    At a normal end, processes wait for each other. After an uncaught exception, a process ends at once.

    Args:
      coordinator_address: host:port of process 0; the port must be free there. Detected under torchrun and Slurm, and
        if mpirun or mpiexec starts all processes on one host. JAX_COORDINATOR_PORT replaces a detected port.
      num_processes: number of processes of the program.
      process_id: number of this process, from 0.
      local_device_ids: GPUs of this process, counted among those of CUDA_VISIBLE_DEVICES. By default, each process of
        the host gets an equal share, in the order of local ranks. The default is all GPUs if the launcher sets no local
        ranks or has bound GPUs to processes itself.
      options: as in jax.distributed.initialize(), with two other defaults. coordinator_bind_address: the service
        listens on the coordinator's address only; if the coordinator's name maps to a loopback address on its own host,
        it listens on all addresses. heartbeat_timeout_seconds: 10^6, the time from the end of the service to the end of
        the process by JAX. shutdown_timeout_seconds, 300 by default, limits the wait at the end of a process.

    Returns:
      The number of processes.

    Raises:
      ValueError: the arguments and the environment are incomplete, or contradict each other.
      RuntimeError: jax.distributed is initialized already, or JAX has started its back ends.
    """
    process = launchers.detect(os.environ)
    address = coordinator_address or (process and process.coordinator) or os.environ.get("JAX_COORDINATOR_ADDRESS")
    detects = options.setdefault("cluster_detection_method", "deactivate") != "deactivate"
    if not detects:
        num_processes = process.size if num_processes is None and process else num_processes
        process_id = process.rank if process_id is None and process else process_id
    given = any(value is not None for value in (address, num_processes, process_id))
    if not given and _compat.on_cloud_tpu():
        del options["cluster_detection_method"]
        jax.distributed.initialize(local_device_ids=local_device_ids, **options)
        return kv_store.num_processes()
    if not given or (num_processes == 1 and address is None):
        return 1
    if not detects and (num_processes is None or process_id is None):
        raise ValueError(
            f"jaxcomm.distributed.initialize: the coordinator is {address!r}, but num_processes is {num_processes} and "
            f"process_id {process_id}; pass them, or set JAX_NUM_PROCESSES and JAX_PROCESS_ID, or use a launcher of "
            "docs/guide/clusters.md"
        )
    host, colon, port = (address or "").rpartition(":")
    if not colon:
        raise ValueError(
            f"jaxcomm.distributed.initialize: coordinator_address must be host:port, got {address!r}; pass it, or set "
            "JAX_COORDINATOR_ADDRESS to host and a free port of process 0"
        )
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "jaxcomm.distributed.initialize: jax.distributed is initialized already; call this once, instead of "
            "jax.distributed.initialize()"
        )
    if local_device_ids is None and process and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        local_device_ids = launchers.local_devices(process, os.environ)
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or _bind_address(host.strip("[]"), port)
    options.setdefault("coordinator_bind_address", bind_address)
    options.setdefault("heartbeat_timeout_seconds", _HEARTBEAT_TIMEOUT_S)
    jax.config.update("jax_enable_recoverability", True)
    relay = _core.start_relay(host.strip("[]"), port)
    jax.distributed.initialize(
        f"unix-abstract:{relay}",
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        **options,
    )
    kv_store.hidden_coordinator = address
    kv_store.kv_set(f"pid/{kv_store.process_id()}", f"{bootstrap.kernel_id()} {os.getpid()}")
    # Runs before JAX's own exit handlers.
    atexit.register(
        _leave, kv_store.process_id(), kv_store.num_processes(), options.get("shutdown_timeout_seconds", 300)
    )
    # A process that does not come to its first call has a file. Its end is recorded before _leave waits.
    recorder.start()
    return kv_store.num_processes()


def _leave(own: int, size: int, limit_s: float) -> None:
    """Exit handler: waits until all processes have reached their end, as JAX does without recoverability.

    The service ends with process 0, so process 0 must be the last one that uses it. Some launchers treat the first end
    of a process as a failure, so all processes must end at about the same time.
    """
    if not jax.distributed.is_initialized():
        return
    client, deadline = kv_store.client(), time.monotonic() + limit_s
    waits = not hasattr(sys, "last_value")  # no uncaught exception
    if own == 0:
        if waits:
            for process in range(1, size):
                _wait(client, f"exit/{process}", deadline, functools.partial(_has_died, client, process))
        with contextlib.suppress(Exception):
            kv_store.kv_set("exit/0", "", timeout_s=10)
        return
    if not _core.relay_has_lost_server():
        with contextlib.suppress(Exception):  # process 0 may have ended
            kv_store.kv_set(f"exit/{own}", "", timeout_s=10)
            if waits:
                _wait(client, "exit/0", deadline, _core.relay_has_lost_server)
    kv_store.detach()
    # Else JAX's call that waits for errors would hold up the end of the service for five seconds, and then end this
    # process with SIGABRT if it is still alive, for example in MPI_Finalize, which waits for process 0.
    _core.close_relay_to_server()


def _wait(client: kv_store.Client, key: str, deadline: float, in_vain: Callable[[], bool]) -> None:
    """Waits for a key. Returns when it is set, at the deadline, when `in_vain()`, or when the service has ended."""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            client.blocking_key_value_get(f"jaxcomm/{key}", max(1, int(1000 * min(left_s, 0.5))))
            return
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or in_vain():
                return


def _has_died(client: kv_store.Client, process: int) -> bool:
    """Whether a process of this host has ended. False for processes of other hosts."""
    try:
        kernel, _, pid = client.blocking_key_value_get(f"jaxcomm/pid/{process}", 1).partition(" ")
    except jax.errors.JaxRuntimeError:
        return False  # the process has not published its id yet
    if kernel != bootstrap.kernel_id():
        return False
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def _bind_address(host: str, port: str) -> str:
    """The coordinator's address; all addresses if other hosts can't reach the coordinator there.

    /etc/hosts often maps a host's own name to the loopback address 127.0.1.1.
    """
    shown = f"[{host}]" if ":" in host else host
    try:
        found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, ValueError):  # the name is not known on this host, or not yet
        return f"{shown}:{port}"
    loopback_only = all(address.is_loopback for address in found)
    meant = host == "localhost" or host in map(str, found)
    return f"[::]:{port}" if loopback_only and not meant else f"{shown}:{port}"
