"""Calls that should fail, for failing.py."""

import json
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm import _core
from jaxcomm._config import config

LIMIT_S, SHORT_S = os.environ["JAXCOMM_TIMEOUT_S"], os.environ.get("SHORT_S", "")
VICTIM = int(os.environ.get("VICTIM", int(os.environ["JAX_NUM_PROCESSES"]) - 1))


def say(what, **more):
    print(json.dumps({"what": what, "at": time.monotonic(), **more}), flush=True)


def program(body, processes=None, devices=None):
    """Returns a function that runs body(block) on these or all devices of the processes, a row each, and waits."""
    devices = devices or [d for d in jax.devices() if processes is None or d.process_index in processes]
    mesh = Mesh(np.array(devices), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))

    def run(rows=None):
        if rows is None:
            rows = np.arange(len(devices) * 8.0).reshape(-1, 8)
        x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("i")), lambda index: rows[index])
        return jax.block_until_ready(f(x))

    return run


def limit(seconds):
    """Of later waits. Only the wait that a test is about may have a short limit: on a busy machine, all last long."""
    os.environ["JAXCOMM_TIMEOUT_S"] = seconds or LIMIT_S
    config.cache_clear()
    _core.set_wait_limits(config().timeout_s, config().warn_s)


def others_are_late():
    """Tests with SHORT_S say when it is so."""
    if SHORT_S:
        sys.stdin.readline()
        limit(SHORT_S)


def attempt(run):
    """Runs a call that should fail. The error comes after the call has returned, so program() waits for the result."""
    try:
        run()
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        limit(LIMIT_S)
        say("error", text=str(error))
    else:
        say("no error")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    """Stops the process before this thread goes on. A signal to the process may reach another thread first, later."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
