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


def initialize():
    """Joins the other processes, before JAX starts. Returns how many there are; alone, 1."""
    if jax.distributed.is_initialized():
        return jax.process_count()
    try:
        from jaxcomm.distributed import initialize
    except ImportError:  # with --comm lax, one process needs no jaxcomm
        if "JAX_COORDINATOR_ADDRESS" in os.environ:
            raise
        return 1
    return initialize()


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
