"""A program of docs/guide/interoperation.md, run by hand: programs of jaxcomm and mpi4jax in turns, and in one program.

mpirun -n 2 --bind-to none python examples/interoperation/with_mpi4jax.py
"""

import jax
import mpi4jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import jaxcomm.distributed


def main():
    jaxcomm.distributed.initialize()
    world, count = MPI.COMM_WORLD, jax.device_count()
    mesh = Mesh(jax.devices(), ("x",))
    whole = np.arange(count * 4, dtype=np.float32).reshape(count, 4)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")), lambda index: whole[index])

    def both(x):
        return mpi4jax.allreduce(jaxcomm.psum(x, "x"), op=MPI.SUM, comm=world)

    psum = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    allreduce = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=world))
    for _ in range(20):
        own = psum(x).addressable_data(0)
        total = allreduce(own + world.rank)
        np.testing.assert_array_equal(own[0], whole.sum(0))
        np.testing.assert_array_equal(total, world.size * own + world.size * (world.size - 1) / 2)
    print(f"process {world.rank}: equal sums in turns", flush=True)
    try:
        jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(x)
        print(f"process {world.rank}: one program works", flush=True)
    except ValueError as error:
        print(f"process {world.rank}: one program: {str(error)[:90]}", flush=True)


if __name__ == "__main__":
    main()
