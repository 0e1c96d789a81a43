"""Times dispatch and combine of jaxcomm.moe on 8 CPU devices.

Usage: python benchmarks/moe.py [T K E d]     8 devices of this process; T tokens per rank, K choices, E experts, rows
                                              of d elements
       python -m jaxcomm.run --processes 2 --devices 4 benchmarks/moe.py [T K E d]     2 processes of 4 devices

Options: --routing uniform | zipf | hot (half of all choices are of one rank's experts), --algorithm A (several are run
in turn), --only-ours (leaves out the exchange with slots for the worst case, whose memory grows with n T min(K, M)).

The same exchange by all_to_all of jax.lax and of jaxcomm, with slots for the worst case, runs in turn with it. So do a
program that only adds 1 to the ids, which is what XLA takes to run anything on all devices, and a copy of all rows of a
process and a sum of them over the choices of each token, by one thread: with results in memory that is in use, the main
reference, and in fresh memory with huge pages. XLA allocates results of more than 32 MiB anew in every execution, so
large exchanges write to fresh memory.

Prints medians in milliseconds: the wall time of the slowest process, and the processor time of all processes.
"""

import argparse
import json
import mmap
import os
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import moe

ROUNDS, ROUNDS_OF_FEW_TOKENS = 7, 101


def worst_case(library, ids, x, weights, experts, n):
    """Token t has slot t * min(K, M) + i at rank p for its i-th choice there."""
    local, (tokens, choices) = experts // n, ids.shape
    per_token = min(choices, local)
    rank = ids // local
    earlier = jnp.arange(choices)[:, None] > jnp.arange(choices)[None, :]
    place = jnp.sum((rank[:, :, None] == rank[:, None, :]) & earlier[None], -1)
    slot = (rank * tokens + jnp.arange(tokens)[:, None]) * per_token + place
    sent = jnp.zeros((n * tokens * per_token, x.shape[1]), x.dtype)
    sent = sent.at[slot.reshape(-1)].set(jnp.repeat(x, choices, axis=0))
    rows = library.all_to_all(sent, "rank", 0, 0, tiled=True)
    back = library.all_to_all(rows, "rank", 0, 0, tiled=True)
    return jnp.sum(back[slot] * weights[..., None], 1)


def ours(ids, x, weights, experts, capacity, algorithm):
    rows, routing = moe.route_and_dispatch(x, ids, "rank", num_experts=experts, capacity=capacity, algorithm=algorithm)
    return moe.combine(rows, routing, weights, algorithm=None if algorithm == "one_shot" else algorithm)


def draw_ids(rng, routing, tokens, choices, experts):
    """Different experts for each token: Gumbel noise on the logarithm of their popularity."""
    popularity = np.ones(experts)
    if routing == "zipf":
        popularity = 1 / np.arange(1, experts + 1)
    elif routing == "hot":
        popularity[: experts // 8] = 7  # half of all choices, of an eighth of the experts
    noise = rng.gumbel(size=(tokens, experts))
    return np.argsort(-(np.log(popularity) + noise), 1)[:, :choices].astype(np.int32)


def fresh(shape):
    """Memory that the kernel has to provide and to clear first."""
    memory = mmap.mmap(-1, int(np.prod(shape)) * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)


def copy_and_sum(source, copy, total):
    """The least work of dispatch and of combine. source: (token, choice, element)."""
    np.copyto(copy, source)
    np.sum(source, 1, out=total)


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def over_processes(numbers, reduce):
    if jax.process_count() == 1:
        return numbers
    return reduce(multihost_utils.process_allgather(np.asarray(numbers)), 0)


def measure(tokens, choices, experts, width, routing, algorithms, with_others):
    """Returns {name: (milliseconds, milliseconds of processors)}, and the bytes of the rows of all ranks, one way."""
    devices = jax.devices()
    n = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("rank",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh, P("rank"))
    ids = draw_ids(rng, routing, n * tokens, choices, experts)
    demand = np.bincount(ids.ravel() * n // experts, minlength=n).max()
    x = rng.standard_normal((n * tokens, width)).astype(np.float32)
    weights = rng.random(ids.shape).astype(np.float32)
    arguments = [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in (ids, x, weights)]

    def program(body):
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"), check_vma=False))
        return lambda: jax.block_until_ready(f(*arguments))

    runs = {
        f"jaxcomm.moe, {a or 'selected'}": program(lambda *b, a=a: ours(*b, experts, int(demand), a))
        for a in algorithms
    }
    if with_others:
        runs["all_to_all of jaxcomm"] = program(lambda *a: worst_case(jaxcomm, *a, experts, n))
        runs["all_to_all of jax.lax"] = program(lambda *a: worst_case(lax, *a, experts, n))
    results = [[np.asarray(s.data) for s in run().addressable_shards] for run in runs.values()]
    for result in results:
        for part, first in zip(result, results[0], strict=True):
            np.testing.assert_allclose(part, first, rtol=1e-4, atol=1e-4)
    runs["a program without exchange"] = program(lambda ids, *_: ids + 1)
    source = np.ones((jax.local_device_count() * tokens, choices, width), np.float32)
    copy, total = np.ones_like(source), np.ones_like(source[:, 0])
    runs["copy and sum, memory in use"] = lambda: copy_and_sum(source, copy, total)
    runs["copy and sum, fresh memory"] = lambda: copy_and_sum(source, fresh(copy.shape), fresh(total.shape))
    times = {name: ([], []) for name in runs}
    for _ in range(ROUNDS if tokens > 128 else ROUNDS_OF_FEW_TOKENS):
        for name, run in runs.items():
            processor, begin = processor_seconds(), time.perf_counter()
            run()
            times[name][0].append(1e3 * (time.perf_counter() - begin))
            times[name][1].append(1e3 * (processor_seconds() - processor))
    medians = {
        name: (float(np.median(over_processes(wall, np.max))), float(np.median(over_processes(processor, np.sum))))
        for name, (wall, processor) in times.items()
    }
    return medians, n * tokens * choices * width * 4


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Times dispatch and combine of jaxcomm.moe.")
    parser.add_argument("sizes", nargs="*", type=int, default=(1024, 8, 64, 1024), metavar="T K E d")
    parser.add_argument("--routing", choices=("uniform", "zipf", "hot"), default="uniform")
    parser.add_argument("--algorithm", action="append", choices=("direct", "hierarchical", "one_shot"))
    parser.add_argument("--only-ours", action="store_true")
    options = parser.parse_args(arguments)
    tokens, choices, experts, width = options.sizes
    algorithms = options.algorithm or (None,)
    times, row_bytes = measure(*options.sizes, options.routing, algorithms, not options.only_ours)
    if jax.process_index() == 0:
        print(
            f"T {tokens}, K {choices}, E {experts}, d {width}, {options.routing}, {jax.process_count()} processes: "
            f"{row_bytes / 1e6:.0f} MB of rows each way"
        )
        for name, (wall, processor) in times.items():
            print(f"  {name:32} {wall:9.2f} ms {processor:9.2f} ms of processors")
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.config.update("jax_platforms", "cpu")
        jaxcomm.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", 8)
    main()
