"""A program in which one device is late, and `outcome`, which runs it for tests.

    late.py <op>

The operation runs with a late device: rank 1 sleeps LATE_S seconds. In one process, it then runs without. "missing" is
a psum that rank 1 never calls when it is late.
"""

import functools
import os
import subprocess
import sys
import time


def outcome(op, *launcher, **environment):
    """Runs the program by ``launcher``, arguments of Python. Returns a CompletedProcess with its output."""
    quick = "JAX_DISABLE_MOST_OPTIMIZATIONS"
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA")) or name == quick}
    return subprocess.run(
        [sys.executable, *launcher, __file__, op], env=kept | {"JAXCOMM_CALIBRATION": ""} | environment,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def main(op):
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcomm

    jax.config.update("jax_platforms", "cpu")
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))

    def sleep(rank, x):
        if rank == 1:
            time.sleep(float(os.environ["LATE_S"]))
        return x

    def body(late, x):
        x = jaxcomm.pmax(x, "i") * 0 + x  # both have compiled the program
        if late:
            x = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("i"), x)
        if op == "missing" and late:  # rank 1 takes another branch
            return jax.lax.cond(jax.lax.axis_index("i") == 1, lambda x: x, lambda x: jaxcomm.psum(x, "i"), x)
        if op != "all_gather_start":
            return jaxcomm.psum(x, "i")
        return jaxcomm.all_gather_start(x, "i", tiled=True).done(after=x * 2)

    x = np.zeros((jax.device_count(), 1), np.float32)
    x[:2] = [[1.0], [5.0]]
    x = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index])
    for late in (True, False)[: 2 if jax.process_count() == 1 else 1]:
        name = "late" if late else "in time"
        of_rank = functools.partial(body, late)
        f = jax.shard_map(of_rank, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        try:
            shards = [np.asarray(shard.data).reshape(-1).tolist() for shard in jax.jit(f)(x).addressable_shards]
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: error: {error}")
        else:
            print(f"{name}: {shards}")
    if op == "missing":
        print("failed:", sorted((site.op, site.failed) for site in jaxcomm.recorder.stats().sites))


if __name__ == "__main__":
    main(*sys.argv[1:])
