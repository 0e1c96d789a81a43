"""Programs that end only if a computation of rank 0 runs beside a transfer.

The computation of rank 0 tells rank 1 that it has begun. Only then does rank 1 start its part of the transfer. The
computation goes on when rank 1 has the result. So the transfer begins and ends while the computation runs.
"""

import threading

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

PATIENCE_S = 60


class Handshake:
    """Events of one execution. Callbacks wait for them with a deadline."""

    def __init__(self):
        self.began, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.missed = []

    def _take(self, event, name):
        if not event.acquire(timeout=PATIENCE_S):
            self.missed.append(name)

    def hold_back(self, rank, x):
        """Rank 1 waits until the computation of rank 0 has begun."""
        if rank == 1:
            self._take(self.began, "the computation did not begin before the transfer ended")
        return x

    def compute(self, rank, x):
        """Rank 0 waits until rank 1 has received."""
        if rank == 0:
            self.began.release()
            self._take(self.arrived, "the transfer did not end during the computation")
        return np.sin(x)

    def receive(self, rank, x):
        if rank == 1:
            self.arrived.release()
        return x


def callback(f, x):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("i"), x)


def work(handshake, x, steps=10):
    """Computations that depend on each other. Each result has the size of x. The one in the middle is the handshake."""
    for step in range(steps):
        f = handshake.compute if step == steps // 2 else lambda rank, x: np.sin(x)
        x = callback(f, x)
    return x


def run(body, x):
    """Runs body(handshake, row) on two devices. Returns its results."""
    handshake = Handshake()
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], body(handshake, x[0])),
        mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False,
    )  # fmt: skip
    y = jax.tree.map(np.asarray, jax.jit(f)(x))
    assert not handshake.missed, handshake.missed
    return y
