"""Programs of failing.py that hang without an error, for the analysis of the flight recorder."""

import contextlib
import json
import os
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

LATE = int(os.environ.get("JAX_PROCESS_ID", "0")) == int(os.environ.get("JAX_NUM_PROCESSES", "1")) - 1


def say(what):
    print(json.dumps({"what": what, "at": time.monotonic()}), flush=True)


def program(op, devices=None):
    """Runs op over one device per process, or over all, and waits."""
    mesh = Mesh(np.array(devices or jax.devices()), ("i",))
    f = jax.jit(jax.shard_map(lambda x: op(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    x = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, P("i")), lambda _: np.ones(1, np.float32))
    return lambda: jax.block_until_ready(f(x))


def crossed_groups():
    """Two processes wait for each other in two groups."""
    groups = [[d for d in jax.devices() if d.id % 2 == number] for number in range(2)]
    programs = [program(jaxcomm.psum, group) for group in groups]
    for run in programs:
        run()
    say("acts")
    for run in reversed(programs) if LATE else programs:
        run()


def never_joined():
    """The last process does not know the call."""
    program(jaxcomm.psum)()
    say("acts")
    if LATE:
        time.sleep(1000)
    program(jaxcomm.pmax)()


def raises_before_the_call():
    run = program(jaxcomm.psum)
    run()
    say("acts")
    if LATE:
        raise KeyError("secret")
    run()


def one_iteration_less():
    run = program(jaxcomm.psum)
    for _ in range(5 - LATE):
        run()
    say("acts")
    if LATE:
        the_next_part_of_the_program()
    run()


def the_next_part_of_the_program():
    sys.stdin.readline()


def slow_disk():
    """The last process waits for a file, as for a disk that does not answer."""
    run = program(jaxcomm.psum)
    run()
    say("acts")
    if LATE:
        write_checkpoint(os.environ["FIFO"])
    run()


def write_checkpoint(path):
    with open(path, "w"):
        pass


def full_shared_memory():
    """The last process gets no more than a page."""
    program(jaxcomm.psum)()
    if LATE:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    run = program(lambda x, axis: jaxcomm.psum(jnp.ones(1 << 22) * x, axis, algorithm="ring")[:1])
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        run()
    sys.stdin.readline()


HANGS = (
    crossed_groups,
    never_joined,
    raises_before_the_call,
    one_iteration_less,
    slow_disk,
    full_shared_memory,
)
SCENARIOS = {f.__name__: f for f in HANGS}
