"""Program of test_collectives.py for every process: collectives.py <what>. Process 0 prints JSON lines."""

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


def place(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


ROWS = P("i")


def program(body, mesh, x, spec=ROWS):
    """Returns a function without arguments that runs the op on x, a row per rank, and waits for its result."""
    placed = place(x, NamedSharding(mesh, spec))
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return lambda: jax.block_until_ready(f(placed))


def same(result, want):
    """Whether the rows of this process equal those of the oracle."""
    return all(np.array_equal(np.asarray(shard.data), want[shard.index]) for shard in result.addressable_shards)


def every_op(mesh, count, all_algorithms):
    """Every supported algorithm, or the selected one, against NumPy. Integers, so that sums are exact."""
    n, checked = mesh.size, 0
    x = np.random.default_rng(3).integers(-64, 64, (n, count)).astype(np.float32)
    blocks, weights = x.reshape(n, n, -1), np.float32([[2, -3]])
    cases = {
        "all_to_all": (lambda x, a: jaxcomm.all_to_all(x.reshape(n, -1), "i", 0, 0, algorithm=a).reshape(1, -1),
                       blocks.swapaxes(0, 1).reshape(n, -1)),
        "all_gather": (lambda x, a: jaxcomm.all_gather(x[0], "i", algorithm=a).reshape(1, -1),
                       np.tile(x.reshape(1, -1), (n, 1))),
        "psum": (lambda x, a: jaxcomm.psum(x, "i", algorithm=a), np.tile(x.sum(0), (n, 1))),
        "pmax": (lambda x, a: jaxcomm.pmax(x, "i", algorithm=a), np.tile(x.max(0), (n, 1))),
        "psum_scatter": (lambda x, a: jaxcomm.psum_scatter(x.reshape(n, -1), "i", tiled=True, algorithm=a),
                         blocks.sum(0)),
        "ppermute": (lambda x, a: jaxcomm.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)], algorithm=a),
                     np.roll(x, 1, 0)),
        "pbroadcast": (lambda x, a: jaxcomm.pbroadcast(x, "i", n - 1, algorithm=a), np.tile(x[-1:], (n, 1))),
        "barrier": (lambda x, a: jaxcomm.barrier(x, "i", algorithm=a), x),
        "all_gather_matmul": (
            lambda x, a: jaxcomm.all_gather_matmul(x.T, weights, "i", algorithm=a).reshape(1, -1),
            np.tile((x.reshape(-1, 1) @ weights).reshape(1, -1), (n, 1))),
        "matmul_psum_scatter": (
            lambda x, a: jaxcomm.matmul_psum_scatter(x.T, weights, "i", algorithm=a).reshape(1, -1),
            (x.sum(0).reshape(-1, 1) @ weights).reshape(n, -1)),
    }  # fmt: skip
    for op, (body, want) in cases.items():
        for algorithm in (None, *(jaxcomm.algorithms(op) if all_algorithms else ())):
            try:
                run = program(lambda x, body=body, a=algorithm: body(x, a), mesh, x)
                results = [run() for _ in range(3)]
            except ValueError as error:
                assert op in str(error)  # the algorithm does not support the group
                continue
            checked += 1
            assert all(same(result, want) for result in results), (op, algorithm, count)
    return checked


def groups_and_orders(mesh):
    """Groups across processes, axes in both orders, other element types, donated and empty operands."""
    n, rng = mesh.size, np.random.default_rng(4)
    x = rng.integers(-9, 9, (n, 4 * n)).astype(np.float32)
    # Adjacent ranks are in different groups, and ranks have another order than devices.
    groups = [list(range(first, n, n // 2))[::-1] for first in range(n // 2)]
    pairs = np.empty((n, 2, 4 * n), np.float32)
    for group in groups:
        pairs[group] = x[group]
    f = program(lambda x: jaxcomm.all_gather(x[0], "i", axis_index_groups=groups).reshape(1, 2, -1), mesh, x)
    assert same(f(), pairs), "all_gather in groups"
    total = np.empty_like(x)
    for group in groups:
        total[group] = x[group].sum(0)
    assert same(program(lambda x: jaxcomm.psum(x, "i", axis_index_groups=groups), mesh, x)(), total), "psum in groups"

    grid = jax.sharding.Mesh(mesh.devices.reshape(2, -1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for axes in (("a", "b"), ("b", "a"), ("b",)):
        rows = x.reshape(2, n // 2, -1)
        order = rows if axes[0] == "a" else rows.swapaxes(0, 1)
        want = np.tile(order.reshape(1, n, -1), (n, 1, 1)) if len(axes) == 2 else np.repeat(rows, n // 2, 0)
        f = program(lambda x, axes=axes: jaxcomm.all_gather(x[0], axes)[None], grid, x, P(("a", "b")))
        assert same(f(), want), f"all_gather over {axes}"

    small = rng.integers(-3, 4, (n, 37)).astype(np.int8)
    for dtype in ("int8", "bfloat16", "complex64"):
        f = program(lambda x, dtype=dtype: jaxcomm.psum(x.astype(dtype), "i").real.astype(np.int8), mesh, small)
        assert same(f(), np.tile(small.sum(0, dtype=np.int8), (n, 1))), dtype
    assert same(program(lambda x: jaxcomm.psum(x, "i"), mesh, x[:, :0])(), x[:, :0]), "empty"

    placed = place(x, NamedSharding(mesh, P("i")))
    step = jax.shard_map(lambda x: jaxcomm.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)]), mesh=mesh,
                         in_specs=P("i"), out_specs=P("i"))  # fmt: skip
    step = jax.jit(step, donate_argnums=0)
    for _ in range(2 * n + 1):
        placed = step(placed)
    assert same(placed, np.roll(x, 1, 0)), "donated"


def values(mesh):
    """With SIZE=full, also runs small operands with every algorithm."""
    checked = every_op(mesh, mesh.size, os.environ.get("SIZE") == "full") + every_op(mesh, 1000 * mesh.size, True)
    groups_and_orders(mesh)
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
    """Measures a chain inside jit, so that results are not in fresh memory."""
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
