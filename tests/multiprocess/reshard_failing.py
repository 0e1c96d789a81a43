"""Arrays that failing.py moves between shardings."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

ROUNDS = []  # of resharding_runs() in this process
NUMBERS = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def place_numbers():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P("i"))
    return jax.make_array_from_callback(NUMBERS.shape, sharding, lambda index: NUMBERS[index])


def resharded(x, spec):
    """Devices in the opposite order, so that every element moves."""
    devices = x.sharding.mesh.devices[::-1]
    return jaxcomm.reshard(x, NamedSharding(Mesh(devices, ("i",)), spec))


def resharding_runs():
    """Moves an array between two shardings in a loop, until a peer fails. Both moves are compiled before."""
    rows = np.arange(1 << 22, dtype=np.float32).reshape(1 << 11, 1 << 11)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P("i"))
    x = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    def there_and_back(x):
        for spec in (P(None, "i"), P("i")):
            x = jax.block_until_ready(resharded(x, spec))
        return x

    def run():
        moved = x
        while True:
            moved = there_and_back(moved)
            ROUNDS.append(1)

    there_and_back(x)
    return run
