"""Program of test_leaks.py: many groups, then many programs. Prints the resources of the process as JSON.

leaking.py <number of groups> <number of programs> <calls of each collective in a program>
"""

import itertools
import json
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from usage import usage


def say(what):
    print(json.dumps({"what": what, **usage()}), flush=True)


def check(devices, count, factor, calls=1):
    """Compiles and runs a program over these devices that calls three collectives several times each."""
    mesh = Mesh(np.array(devices), ("i",), axis_types=(AxisType.Auto,))
    x = np.arange(mesh.size * count, dtype=np.int32).reshape(mesh.size, count)

    def body(x):
        def call(x):
            return jaxcomm.psum(x, "i") * factor + jaxcomm.pbroadcast(x, "i", 0) + jaxcomm.ppermute(x, "i", [(0, 0)])

        return sum(call(x + i) for i in range(calls))

    placed = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index])
    y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))(placed)
    for shard in y.addressable_shards:
        rank = shard.index[0].start or 0
        want = sum((x + i).sum(0) * factor + (x[0] + i) * (1 + (rank == 0)) for i in range(calls))
        np.testing.assert_array_equal(np.asarray(shard.data)[0], want)


def main(num_groups, num_programs, calls):
    jax.distributed.initialize()
    devices = jax.devices()
    # Groups of both processes, all sizes from 2 to 8: every device of the first with those that follow.
    every = [
        group
        for size in range(2, len(devices) + 1)
        for group in itertools.combinations(devices, size)
        if len({device.process_index for device in group}) == 2
    ]
    groups = [every[i * len(every) // num_groups] for i in range(num_groups)]
    for number in range(max(num_programs // 10, 12)):
        check(devices, 8 * (1 + number % 20), number, calls)
    jax.clear_caches()
    say("warm")
    for number, group in enumerate(groups):
        check(group, 8, number)
    jax.clear_caches()
    say("groups")
    for number in range(num_programs):
        check(devices, 8 * (1 + number % 20), number, calls)
        if number % 50 == 49:
            jax.clear_caches()
    jax.clear_caches()
    say("programs")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
