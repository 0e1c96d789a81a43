"""The program of test_beside.py: an exchange of two processes, whose computations wait for each other.

Files in the folder of the argument are the events.
"""

import pathlib
import sys
import time

import jax
import numpy as np
from harness import on_ranks
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_beside import SIZE, Handshake, exchange

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


handshake = Handshake()
handshake.began, handshake.arrived = Event("began"), Event("arrived")


def body(x):
    x = jaxcomm.pmax(x, "i") * 0 + x  # both have compiled the program
    return exchange(handshake, x)[0]


jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
f = jax.jit(on_ranks(body, mesh, check_vma=False))
x = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)
y = f(jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index]))
(shard,) = y.addressable_shards
np.testing.assert_allclose(shard.data, np.sin(x[::-1])[shard.index], rtol=1e-6)
assert not handshake.missed, handshake.missed
print("done", flush=True)
