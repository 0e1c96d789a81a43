"""Compares jaxcomm.ppermute with jax.lax.ppermute (gloo) between two processes, in turns.

    python -m jaxcomm.run --processes 2 --nodes 2 benchmarks/permute.py --json out.json

One way: rank 0 sends. Both ways: the ranks exchange. A time is that of the slowest process after a barrier; processor
time is the sum over the processes, which a busy machine changes less.
"""

import argparse
import functools
import json
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

PAIRS = {"one way": [(0, 1)], "both ways": [(0, 1), (1, 0)]}


def measure(call):
    """Seconds of the slowest process, and of all processors."""
    multihost_utils.sync_global_devices("start")
    begin, cpu = time.perf_counter(), time.process_time()
    call().block_until_ready()
    own = np.float32([time.perf_counter() - begin, time.process_time() - cpu])
    both = multihost_utils.process_allgather(own)
    return float(both[:, 0].max()), float(both[:, 1].sum())


def compare(size, pairs, rounds):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    whole = np.arange(2 * size // 4, dtype=np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("i")), lambda index: whole[index])
    wanted = np.zeros((2, len(whole) // 2), np.float32)
    for source, destination in pairs:
        wanted[destination] = whole.reshape(2, -1)[source]
    sides = {}
    for name, library in (("jaxcomm", jaxcomm), ("lax", jax.lax)):
        permute = functools.partial(library.ppermute, axis_name="i", perm=pairs)
        sides[name] = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
        for shard in sides[name](x).addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[jax.process_index()])
    found = {name: [] for name in sides}
    for i in range(rounds):
        for name in sorted(sides, reverse=i % 2):
            found[name].append(measure(functools.partial(sides[name], x)))
    row = {"bytes": size}
    for name, times in found.items():
        wall, cpu = np.array(times).T * 1e3
        row |= {
            f"{name} ms, median": round(float(np.median(wall)), 3),
            f"{name} ms, least": round(float(wall.min()), 3),
        }
        row[f"{name} processor ms, median"] = round(float(np.median(cpu)), 3)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << i for i in range(10, 25, 2)])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    jaxcomm.distributed.initialize()
    said = {"command": " ".join(sys.argv)}
    for name, pairs in PAIRS.items():
        said[name] = [compare(size, pairs, arguments.rounds) for size in arguments.bytes]
    if jax.process_index() == 0:
        print(json.dumps(said, indent=1))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(said, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
