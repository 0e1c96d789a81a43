"""The program of test_processes.py: an exchange of two processes, whose computations wait for each other.

As in handshake.py, but files in the folder of the argument are the events.
"""

import pathlib
import sys
import time

import handshake as shake
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_beside import SIZE, exchange

import jaxcomm


class Event:
    """A semaphore between processes, which is released once."""

    def __init__(self, name):
        self._path = pathlib.Path(sys.argv[1], name)
        self.release = self._path.touch

    def acquire(self, timeout):
        deadline = time.monotonic() + timeout
        while not self._path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._path.exists()


handshake = shake.Handshake()
handshake.began, handshake.arrived = Event("began"), Event("arrived")


def body(x):
    x = jaxcomm.pmax(x[0], "i") * 0 + x[0]  # both have compiled the program
    return exchange(handshake, x)[0][None]


jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
x = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)
y = f(jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index]))
(shard,) = y.addressable_shards
np.testing.assert_allclose(shard.data, np.sin(x[::-1])[shard.index], rtol=1e-6)
assert not handshake.missed, handshake.missed
print("done", flush=True)
