"""What test_collectives.py runs in every process of every host: collectives.py <what>. Process 0 prints JSON lines."""

import json
import os
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

CHAIN = 4


def program(body, mesh, x):
    """Of x, with a row per rank: a function without arguments, which waits for its result."""
    placed = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index])
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    return lambda: jax.block_until_ready(f(placed))


def same(result, want):
    """Whether the rows of this process are those of the oracle."""
    return all(np.array_equal(np.asarray(shard.data), want[shard.index]) for shard in result.addressable_shards)


def values(mesh):
    """Every op with every algorithm that fits, against NumPy; integers, so that sums are exact."""
    n, rng, checked = mesh.size, np.random.default_rng(3), 0
    for count in (n, 1000 * n):
        x = rng.integers(-64, 64, (n, count)).astype(np.float32)
        blocks = x.reshape(n, n, -1)
        cases = {
            "all_to_all": (lambda x, a: jaxcomm.all_to_all(x.reshape(n, -1), "i", 0, 0, algorithm=a).reshape(1, -1),
                           blocks.swapaxes(0, 1).reshape(n, -1)),
            "all_gather": (lambda x, a: jaxcomm.all_gather(x[0], "i", algorithm=a).reshape(1, -1),
                           np.tile(x.reshape(1, -1), (n, 1))),
            "psum": (lambda x, a: jaxcomm.psum(x, "i", algorithm=a), np.tile(x.sum(0), (n, 1))),
            "psum_scatter": (lambda x, a: jaxcomm.psum_scatter(x.reshape(n, -1), "i", tiled=True, algorithm=a),
                             blocks.sum(0)),
            "ppermute": (lambda x, a: jaxcomm.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)], algorithm=a),
                         np.roll(x, 1, 0)),
            "pbroadcast": (lambda x, a: jaxcomm.pbroadcast(x, "i", n - 1, algorithm=a), np.tile(x[-1:], (n, 1))),
            "barrier": (lambda x, a: jaxcomm.barrier(x, "i", algorithm=a), x),
        }  # fmt: skip
        for op, (body, want) in cases.items():
            for algorithm in (None, *jaxcomm.algorithms(op)):
                try:
                    run = program(lambda x, body=body, a=algorithm: body(x, a), mesh, x)
                    results = [run() for _ in range(3)]
                except ValueError as error:
                    assert op in str(error)  # it doesn't fit
                    continue
                checked += 1
                assert all(same(result, want) for result in results), (op, algorithm, count)
    return {"checked": checked}


def median_s(run, repetitions):
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def compare(mesh, body, x, algorithms, rounds, repetitions):
    """Median time of each algorithm, in turn."""
    runs = {a: program(lambda x, a=a: body(x, a), mesh, x) for a in algorithms}
    for run in runs.values():
        run()
    times = {a: [] for a in algorithms}
    for _ in range(rounds):
        for a, run in runs.items():
            times[a].append(median_s(run, repetitions))
    return {str(a): float(np.median(t)) for a, t in times.items()}


def small_all_to_all(mesh):
    n = mesh.size
    x = np.ones((n, n * 64), np.float32)  # 256 bytes a block

    def body(x, a):
        for _ in range(CHAIN):
            x = jaxcomm.all_to_all(x.reshape(n, -1), "i", 0, 0, algorithm=a).reshape(1, -1)
        return x

    times = compare(mesh, body, x, ("hierarchical", "direct", "pairwise", None), 5, 10)
    return {algorithm: seconds / CHAIN for algorithm, seconds in times.items()}


def large_psum(mesh):
    """In a chain inside jit, so that results are not fresh memory."""
    x = np.ones((mesh.size, 1 << 22), np.int32)  # 16 MiB

    def chain(x, algorithm=None):
        for _ in range(CHAIN):
            x = jaxcomm.psum(x, "i", algorithm=algorithm)
        return x

    run = program(chain, mesh, x)
    assert same(run(), np.full(x.shape, mesh.size**CHAIN))
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    times = []
    for _ in range(5):
        times.append(median_s(run, 1) / CHAIN)
    print(json.dumps({"seconds": float(np.median(times))}), flush=True)
    sys.stdin.readline()
    flat = program(lambda x: chain(x, "ring"), mesh, x)
    flat()
    return {"seconds": median_s(flat, 1) / CHAIN}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    outcome = {"values": values, "small_all_to_all": small_all_to_all, "large_psum": large_psum}[sys.argv[1]](mesh)
    if jax.process_index() == 0:
        print(json.dumps(outcome), flush=True)
    sys.stdin.readline()
    os._exit(0)
