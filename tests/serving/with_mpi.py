"""A program of docs/guide/interoperation.md: collectives of jaxcomm, and MPI in another thread, in the same processes.

With an argument, each process is a node, and jaxcomm and MPI share the UCX of the wheel.
"""

import os
import sys
import threading

if len(sys.argv) > 1:
    import libucx

    os.environ["JAXCOMM_NODE_ID"] = f"node{os.environ['OMPI_COMM_WORLD_RANK']}"
    libucx.load_library()  # before MPI loads another one

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import jaxcomm.distributed

COUNT, ROUNDS = 300_000, 20


def sum_by_mpi(world, wrong):
    own, total = np.full(COUNT, world.rank + 1.0), np.empty(COUNT)
    for number in range(ROUNDS):
        world.Allreduce(own, total)
        if not (total == world.size * (world.size + 1) / 2).all():
            wrong.append(number)


def main():
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    jaxcomm.distributed.initialize()
    world = MPI.COMM_WORLD
    assert jax.process_index() == world.rank
    mesh, count = Mesh(jax.devices(), ("x",)), jax.device_count()
    whole = np.arange(count * COUNT, dtype=np.float32).reshape(count, COUNT) % 7
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")), lambda index: whole[index])
    psum = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    wrong = []
    thread = threading.Thread(target=sum_by_mpi, args=(world, wrong))
    thread.start()
    for _ in range(ROUNDS):
        np.testing.assert_array_equal(psum(x).addressable_data(0)[0], whole.sum(0))
    thread.join()
    assert not wrong, f"MPI's sums were wrong in rounds {wrong}"
    with open("/proc/self/maps") as maps:
        libraries = {os.path.realpath(line.split()[-1]) for line in maps if "libucp" in line}
    assert len(libraries) == 1, libraries
    print(f"process {world.rank}: equal sums, {libraries.pop()}", flush=True)


if __name__ == "__main__":
    main()
