"""Programs of several processes: bootstrap, global arrays, common decisions, failures. No effect in one process."""

import contextlib
import os
import signal
import sys
import traceback

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def initialize():
    """Joins the other processes, before JAX starts its back ends. Returns the number of processes."""
    if jax.distributed.is_initialized():
        return jax.process_count()
    try:
        from jaxcomm.distributed import initialize
    except ImportError:  # --comm lax in one process works without jaxcomm
        if "JAX_COORDINATOR_ADDRESS" in os.environ:
            raise
        return 1
    return initialize()


def put(array, sharding):
    """Returns a global array; ``array`` is a NumPy array of the global shape, equal in all processes.

    jax.device_put would first compare the arrays of all processes.
    """
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def make_any(mesh, comm):
    """Returns any_process(flag): whether the flag of any process is set. All processes must call it."""
    if jax.process_count() == 1:
        return bool
    axes = mesh.axis_names
    count = jax.jit(jax.shard_map(lambda x: comm.psum(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P()))
    return lambda flag: bool(count(put(np.full(mesh.size, flag, np.int32), NamedSharding(mesh, P(axes))))[0])


class Interrupt:
    """Ctrl-C sets a flag, so that the current step ends and can be saved. A second Ctrl-C stops at once."""

    def __enter__(self):
        self.asked = False
        try:
            self.old = signal.signal(signal.SIGINT, self.interrupt)
        except ValueError:  # signal handlers can be set in the main thread only
            self.old = None
        return self

    def interrupt(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, self.old)

    def __exit__(self, *_):
        if self.old is not None:
            signal.signal(signal.SIGINT, self.old)


@contextlib.contextmanager
def prompt_failure():
    """Context that ends this process at once after a failure, so that a launcher ends the others.

    At a normal exit, JAX waits for all processes for up to 300 s.
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
