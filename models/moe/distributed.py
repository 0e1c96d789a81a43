"""Several processes: how they find each other, share data, agree and fail. Alone, nothing here has an effect."""

import contextlib
import os
import sys
import traceback

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .model import AXES

RANK_AND_SIZE = [
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),  # jaxcomm.run, by hand, Kubernetes
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and what derives from it
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
]


def initialize():
    """Joins the other processes, as docs/guide/clusters.md says, before JAX starts. Returns how many there are.

    Without JAX_COORDINATOR_ADDRESS in the environment this process is alone.
    """
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return 1
    rank, size = next(names for names in RANK_AND_SIZE if names[0] in os.environ)
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(
            num_processes=int(os.environ[size]),
            process_id=int(os.environ[rank]),
            cluster_detection_method="deactivate",  # otherwise jax 0.12 wants mpi4py under Open MPI 5
        )
    return int(os.environ[size])


def put(array, sharding):
    """The global array whose shards here are cut from ``array``, a NumPy array of the global shape.

    jax.device_put would have all processes compare their arrays first.
    """
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def make_any(mesh, comm):
    """any_process(flag): whether the flag of at least one process is set. All must call it, and all get one answer."""
    if jax.process_count() == 1:
        return bool
    count = jax.jit(jax.shard_map(lambda x: comm.psum(x, AXES), mesh=mesh, in_specs=P(AXES), out_specs=P()))
    return lambda flag: bool(count(put(np.full(mesh.size, flag, np.int32), NamedSharding(mesh, P(AXES))))[0])


@contextlib.contextmanager
def prompt_failure():
    """Ends this process at once when it fails, so that a launcher ends the others.

    Python's own way out leads to JAX, which waits there for all processes, up to 300 s.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        if isinstance(error, SystemExit):
            print(error, file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
