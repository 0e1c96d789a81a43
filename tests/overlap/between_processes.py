"""The program of test_processes.py: an exchange of two processes, whose computations wait for each other.

As in handshake.py, but files in the folder of the argument are the events.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

PATIENCE_S = 30
SIZE = 1 << 15
events = pathlib.Path(sys.argv[1])


def happens(name):
    (events / name).touch()


def wait_for(name):
    deadline = time.monotonic() + PATIENCE_S
    while not (events / name).exists():
        if time.monotonic() > deadline:
            print("missed:", name, flush=True)
            return
        time.sleep(0.01)


def hold_back(rank, x):
    if rank == 1:
        wait_for("computing")
    return x


def compute(rank, x):
    if rank == 0:
        happens("computing")
        wait_for("received")
    return np.sin(x)


def receive(rank, x):
    if rank == 1:
        happens("received")
    return x


def callback(f, x):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("i"), x)


def body(x):
    x = jaxcomm.pmax(x[0], "i") * 0 + x[0]  # both have compiled the program
    operand = callback(hold_back, jnp.sin(x))
    pending = jaxcomm.ppermute_start(operand, "i", [(0, 1), (1, 0)])
    y = operand / 2
    for step in range(10):
        y = callback(compute if step == 5 else lambda rank, y: np.sin(y), y)
    return callback(receive, pending.done(after=y))[None]


jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
x = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)
y = f(jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index]))
(shard,) = y.addressable_shards
np.testing.assert_allclose(shard.data, np.sin(x[::-1])[shard.index], rtol=1e-6)
print("done", flush=True)
