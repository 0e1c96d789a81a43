"""Times dispatch and combine of jaxcomm.moe on 8 CPU devices.

Usage: python benchmarks/moe.py [T K E d]     8 devices of this process; T tokens per rank, K choices, E experts, rows
                                              of d elements
       python -m jaxcomm.run --processes 2 --devices 4 benchmarks/moe.py [T K E d]     2 processes of 4 devices

Over a shaped link between two hosts (needs root): pytest tests/hosts/test_collectives.py --size full -k moe_sends

Options: --routing uniform | zipf | hot (half of all choices are of one rank's experts), --algorithm A (several are run
in turn), --only-ours (leaves out the exchange with slots for the worst case, whose memory grows with n T min(K, M)).

The same exchange by all_to_all of jax.lax and of jaxcomm, with slots for the worst case, runs in turn with it, and so
do two copies of all rows of a process by one thread: into memory that is in use, and into fresh memory with huge pages.
XLA allocates results of more than 32 MiB anew in every execution, so large exchanges write to fresh memory. Prints
medians in milliseconds of the slowest process.
"""

import argparse
import json
import mmap
import os
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


def copy_to_fresh(source):
    """Copies to memory that the kernel has to provide and to clear first."""
    memory = mmap.mmap(-1, source.nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, source.dtype).reshape(source.shape)
    np.copyto(target, source)


def slowest(seconds):
    """The longest time of all processes, by round."""
    if jax.process_count() == 1:
        return seconds
    return np.max(multihost_utils.process_allgather(np.asarray(seconds)), 0)


def measure(tokens, choices, experts, width, routing, algorithms, with_others):
    """Returns {name: median milliseconds}, and the bytes of the rows of all ranks, one way."""
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
    source = np.ones((jax.local_device_count() * tokens * choices, width), np.float32)
    target = np.ones_like(source)
    runs["two copies of the rows"] = lambda: (np.copyto(target, source), np.copyto(target, source))
    runs["two copies to fresh memory"] = lambda: (copy_to_fresh(source), copy_to_fresh(source))
    times = {name: [] for name in runs}
    for _ in range(ROUNDS if tokens > 128 else ROUNDS_OF_FEW_TOKENS):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: float(np.median(slowest(t))) for name, t in times.items()}, n * tokens * choices * width * 4


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
        for name, value in times.items():
            print(f"  {name:28} {value:9.2f} ms")
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.config.update("jax_platforms", "cpu")
        jaxcomm.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", 8)
    main()
