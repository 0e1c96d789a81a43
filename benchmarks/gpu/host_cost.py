"""Cost of a call inside jit: chains of collectives of 8 bytes, compared with a chain of empty custom calls.

    python host_cost.py <file with EmptyCall>    # tests/cuda/gpu/empty_call.cc

The group has one rank, so no rank waits. Prints one line of JSON with two times per op. The time until the program
returns is the time in which the host enqueues the calls. The time until it is done is the longer of host and GPU. If
JAX enqueues the calls on another thread, the first time is not that of the host, and is omitted. The chain of empty
calls shows that.
"""

import ctypes
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxcomm

LENGTHS = (64, 320)  # the difference of the times excludes the cost of the program itself
ROUNDS = 41
UNTIL = ("until it returns", "until it is done")


def empty(x):
    return jax.ffi.ffi_call("jaxcomm_empty", jax.typeof(x), has_side_effect=True, input_output_aliases={0: 0})(x)


SIDES = {
    "empty": empty,
    "psum": lambda x: jaxcomm.psum(x, "i", algorithm="direct"),
    "all_to_all": lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True, algorithm="direct"),
    "barrier": lambda x: jaxcomm.barrier(x, "i", algorithm="direct"),
}


def summary(us):
    """Time per call, and time above that of an empty call; us: {(side, length): time of the whole program}."""
    per_call = {side: (us[side, LENGTHS[1]] - us[side, LENGTHS[0]]) / (LENGTHS[1] - LENGTHS[0]) for side in SIDES}
    return {
        "us_per_call": {side: round(t, 3) for side, t in per_call.items()},
        "us_above_empty": {side: round(t - per_call["empty"], 3) for side, t in per_call.items() if side != "empty"},
        "whole_us": {f"{side} x {length}": round(t, 1) for (side, length), t in us.items()},
    }


def main(path):
    library = ctypes.CDLL(path)
    for platform in ("CUDA", "cpu"):
        jax.ffi.register_ffi_target("jaxcomm_empty", jax.ffi.pycapsule(library.EmptyCall), platform=platform)
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",), axis_types=(AxisType.Auto,))
    x = jnp.arange(2, dtype=np.float32)

    def chain(call, length):
        def body(x):
            for _ in range(length):
                x = call(x)
            return x

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))

    programs = {(side, length): chain(call, length) for side, call in SIDES.items() for length in LENGTHS}
    times = {key: [] for key in programs}
    for number in range(-3, ROUNDS):
        for key, f in programs.items():  # in turns
            began = time.perf_counter()
            y = f(x)
            returned = time.perf_counter()
            jax.block_until_ready(y)
            if number >= 0:
                times[key].append((returned - began, time.perf_counter() - began))
    found = {"what": "host", "platform": jax.devices()[0].platform}
    for until, values in zip(UNTIL, ({key: [t[i] for t in times[key]] for key in times} for i in (0, 1)), strict=True):
        found[until] = summary({key: statistics.median(of_key) * 1e6 for key, of_key in values.items()})
    empty_us = [found[until]["us_per_call"]["empty"] for until in UNTIL]
    if empty_us[0] < empty_us[1] / 2:  # the GPU is idle in this chain
        del found[UNTIL[0]]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
