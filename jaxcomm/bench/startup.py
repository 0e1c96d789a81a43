"""Measures the time from the start of a process to its first collective. launch.py runs this script in each process.

startup.py none|jaxcomm|gloo: prints times in seconds since the start of this process, as JSON: the end of
jax.distributed.initialize(), of the first program without communication, and of the first collective (not for none).
"""

import json
import os
import sys
import time


def _since_start_s() -> float:
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main(what: str) -> None:
    # The time includes imports, so this process imports only what it needs.
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    psum = jax.lax.psum
    if what == "jaxcomm":
        from jaxcomm import psum
    ends_s = {}
    jax.distributed.initialize()
    ends_s["initialize"] = _since_start_s()
    mesh, spec = Mesh(np.array(jax.devices()), "i"), P("i")
    ones = np.ones(256 * mesh.size, np.float32)
    x = jax.make_array_from_callback(ones.shape, NamedSharding(mesh, spec), lambda index: ones[index])
    jax.jit(lambda x: x + 1)(x).block_until_ready()
    ends_s["computation"] = _since_start_s()
    if what != "none":
        f = jax.jit(jax.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=P()))
        f(x).block_until_ready()
        ends_s["collective"] = _since_start_s()
    print(json.dumps(ends_s))


if __name__ == "__main__":
    main(sys.argv[1])
