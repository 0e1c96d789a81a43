"""Programs of several processes: bootstrap, global arrays, checkpoints, common decisions, failures."""

import contextlib
import os
import signal
import sys
import traceback

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, SingleDeviceSharding
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


def restore(checkpoints, step, shapes, shardings, comm):
    """Returns the tree of a checkpoint with these shardings, whatever the mesh that saved it.

    On CPUs, each array is read once, by one device: the largest array by the device that has read least. comm.reshard
    moves it from there to all others. jax.device_put can't, so with --comm lax each process reads its own shards; also
    on GPUs, whose memory need not hold whole arrays.
    """
    leaves, structure = jax.tree.flatten(shapes)
    readers = targets = jax.tree.leaves(shardings)
    devices = list(targets[0].mesh.devices.flat)
    if comm.reshard is not jax.device_put and devices[0].platform == "cpu":
        num_read = dict.fromkeys(devices, 0)
        readers = list(targets)
        for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
            device = min(num_read, key=num_read.get)
            num_read[device] += leaves[i].size
            readers[i] = SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, readers, strict=True)]
    asked = [x if x.sharding.addressable_devices else ocp.PLACEHOLDER for x in arrays]
    tree = structure.unflatten(asked)
    options = ocp.checkpoint_utils.construct_restore_args(tree)
    read = checkpoints.restore(step, args=ocp.args.PyTreeRestore(tree, restore_args=options))
    # A process has the shape of an array that another one reads.
    known = [x if y is ocp.PLACEHOLDER else y for x, y in zip(arrays, structure.flatten_up_to(read), strict=True)]
    return comm.reshard(structure.unflatten(known), shardings, donate=True)


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
