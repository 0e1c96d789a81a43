"""Programs of several processes: initialize() joins them, register() connects them for what was compiled elsewhere."""

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

from jaxcomm import _bootstrap, _compat, _core, _kv_store, _launchers
from jaxcomm._bootstrap import register

__all__ = ["initialize", "register"]

# JAX ends a process that has got no answer from the coordinator for so long. Must fit into 32 bits as milliseconds.
_HEARTBEAT_TIMEOUT_S = 1_000_000


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    **options: Any,
) -> int:
    """Joins the processes of this program, under any launcher of docs/guide/clusters.md; alone, does nothing.

    Call it before JAX touches a device, in all processes. It calls `jax.distributed.initialize()` with the arguments
    that the launcher's environment variables imply. An argument overrides `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and `JAX_LOCAL_DEVICE_IDS`, and these override the variables of torchrun, Open
    MPI, MPICH and Slurm. On Cloud TPUs JAX itself detects everything.

    The program survives the death of any process, process 0 included. JAX alone ends every process as soon as process
    0, which holds the coordination service, has ended. Here JAX's client reaches the service through a relay in its own
    process, whose connection stays open. Collectives with a dead process raise; those without it work on. Only uses of
    the service fail, by their time limits: barriers of `jax.distributed`, and first contact between two processes. Sets
    `jax_enable_recoverability`. At a normal end, processes wait for each other; after an uncaught exception, a process
    ends at once.

    Args:
      coordinator_address: host:port of process 0; the port must be free there. Detected under torchrun and Slurm, and
        where mpirun or mpiexec starts all processes on one host. JAX_COORDINATOR_PORT replaces a detected port.
      num_processes: processes of the program.
      process_id: number of this one, from 0.
      local_device_ids: the GPUs of this process, among those that CUDA_VISIBLE_DEVICES leaves. By default an equal part
        for each process of the host, in the order of their local ranks. All of them if the launcher tells no local
        ranks, or has bound GPUs to processes itself.
      options: as in jax.distributed.initialize(), with two other defaults. The service listens on the coordinator's
        address only (coordinator_bind_address), or on all addresses where the coordinator's name leads to a loopback
        address on its own host. heartbeat_timeout_seconds is 10^6: JAX ends the process that long after the service has
        ended. shutdown_timeout_seconds, 300 by default, bounds the wait at the end of a process.

    Returns:
      The number of processes.

    Raises:
      ValueError: the arguments and the environment leave something open, or contradict each other.
      RuntimeError: jax.distributed is initialized already, or JAX has started its back ends.
    """
    process = _launchers.detect(os.environ)
    address = coordinator_address or (process and process.coordinator) or os.environ.get("JAX_COORDINATOR_ADDRESS")
    detects = options.setdefault("cluster_detection_method", "deactivate") != "deactivate"
    if not detects:
        num_processes = process.size if num_processes is None and process else num_processes
        process_id = process.rank if process_id is None and process else process_id
    given = any(value is not None for value in (address, num_processes, process_id))
    if not given and _compat.on_cloud_tpu():
        del options["cluster_detection_method"]
        jax.distributed.initialize(local_device_ids=local_device_ids, **options)
        return _kv_store.num_processes()
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
        local_device_ids = _launchers.local_devices(process, os.environ)
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
    _kv_store.hidden_coordinator = address
    _kv_store.kv_set(f"pid/{_kv_store.process_id()}", f"{_bootstrap.kernel_id()} {os.getpid()}")
    # Runs before what JAX has registered.
    atexit.register(
        _leave, _kv_store.process_id(), _kv_store.num_processes(), options.get("shutdown_timeout_seconds", 300)
    )
    return _kv_store.num_processes()


def _leave(own: int, size: int, limit_s: float) -> None:
    """At the end of a process: waits until all have come to theirs, as JAX does without recoverability.

    The service ends with process 0, so others must not need it any more. And a launcher that takes the first end of a
    process for a failure must find all of them at theirs.
    """
    if not jax.distributed.is_initialized():
        return
    client, deadline = _kv_store.client(), time.monotonic() + limit_s
    waits = not hasattr(sys, "last_value")  # no uncaught exception
    if own == 0:
        if waits:
            for process in range(1, size):
                _wait(client, f"exit/{process}", deadline, functools.partial(_has_died, client, process))
        with contextlib.suppress(Exception):
            _kv_store.kv_set("exit/0", "", timeout_s=10)
        return
    if not _core.relay_has_lost_server():
        with contextlib.suppress(Exception):  # process 0 may be gone now
            _kv_store.kv_set(f"exit/{own}", "", timeout_s=10)
            if waits:
                _wait(client, "exit/0", deadline, _core.relay_has_lost_server)
    _kv_store.detach()


def _wait(client: _kv_store.Client, key: str, deadline: float, in_vain: Callable[[], bool]) -> None:
    """Returns once the key is set, at the deadline, when it is in vain, or when the service has gone."""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            client.blocking_key_value_get(f"jaxcomm/{key}", max(1, int(1000 * min(left_s, 0.5))))
            return
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or in_vain():
                return


def _has_died(client: _kv_store.Client, process: int) -> bool:
    """Whether a process of this host has ended. Those of other hosts can't be seen."""
    try:
        kernel, _, pid = client.blocking_key_value_get(f"jaxcomm/pid/{process}", 1).partition(" ")
    except jax.errors.JaxRuntimeError:
        return False  # it has just begun
    if kernel != _bootstrap.kernel_id():
        return False
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def _bind_address(host: str, port: str) -> str:
    """The coordinator's address, unless other hosts could not reach it there.

    /etc/hosts often maps a host's own name to 127.0.1.1.
    """
    shown = f"[{host}]" if ":" in host else host
    try:
        found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, ValueError):  # not known here, or not yet
        return f"{shown}:{port}"
    loopback_only = all(address.is_loopback for address in found)
    meant = host == "localhost" or host in map(str, found)
    return f"[::]:{port}" if loopback_only and not meant else f"{shown}:{port}"
