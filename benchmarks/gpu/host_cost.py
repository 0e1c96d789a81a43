"""What a call costs the host inside jit: chains of collectives of 8 bytes beside a chain of custom calls of nothing.

    python host_cost.py <file with EmptyCall>    # tests/cuda/gpu/empty_call.cc

In a group of one rank, so nobody waits for anybody. Prints one line of JSON.
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

LENGTHS = (64, 320)  # the difference has no cost of the program itself
ROUNDS = 41


def empty(x):
    return jax.ffi.ffi_call("jaxcomm_empty", jax.typeof(x), has_side_effect=True, input_output_aliases={0: 0})(x)


SIDES = {
    "empty": empty,
    "psum": lambda x: jaxcomm.psum(x, "i", algorithm="direct"),
    "all_to_all": lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True, algorithm="direct"),
    "barrier": lambda x: jaxcomm.barrier(x, "i", algorithm="direct"),
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
            jax.block_until_ready(f(x))
            if number >= 0:
                times[key].append(time.perf_counter() - began)
    medians = {key: statistics.median(values) for key, values in times.items()}
    per_call = {
        side: (medians[side, LENGTHS[1]] - medians[side, LENGTHS[0]]) / (LENGTHS[1] - LENGTHS[0]) * 1e6
        for side in SIDES
    }
    above = {side: round(us - per_call["empty"], 3) for side, us in per_call.items() if side != "empty"}
    print(json.dumps({
        "what": "host",
        "platform": jax.devices()[0].platform,
        "us_per_call": {side: round(us, 3) for side, us in per_call.items()},
        "us_above_empty": above,
        "whole_us": {f"{side} x {length}": round(t * 1e6, 1) for (side, length), t in medians.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
