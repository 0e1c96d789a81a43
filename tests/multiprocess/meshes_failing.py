"""Programs of failing.py over several meshes or groups. Nothing here fails."""

import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm


def meshes_of_different_devices():
    """Each of two processes is late on another device. Meanwhile, its other device waits in another mesh."""
    each = [[d for d in jax.devices() if d.process_index == p] for p in range(2)]

    def start(number):
        def late(x):
            if jax.process_index() == number:
                time.sleep(2)
            return x

        def body(x):
            return jaxcomm.psum(jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x), "i")

        mesh = Mesh(np.array([devices[number] for devices in each]), ("i",))
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
        return f, jax.make_array_from_callback((2,), NamedSharding(mesh, P("i")), lambda _: np.ones(1, np.float32))

    calls = [start(number) for number in range(2)]
    for result in [f(x) for f, x in calls]:
        assert result.addressable_data(0) == 2


def two_groupings(x):
    """Of three processes with two devices each. Process 2 needs process 0 only after that has met process 1."""
    for groups in [[0, 2], [1, 3], [4, 5]], [[0, 4], [1, 5], [2, 3]]:
        x = jaxcomm.psum(x, "i", axis_index_groups=groups)
    return x
