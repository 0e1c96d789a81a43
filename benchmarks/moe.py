"""Times dispatch and combine of jaxcomm.moe on 8 CPU devices of one process.

Usage: python benchmarks/moe.py T K E d, for T tokens per rank, K choices, E experts and rows of d elements.

The same exchange by all_to_all of jax.lax and of jaxcomm, with slots for the worst case, runs in turn with it, and so
do two copies of all rows by one thread into fresh memory. Prints medians in milliseconds. The memory of the worst case
grows with n * T * min(K, M).
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import moe

RANKS, ROUNDS = 8, 7


def worst_case(library, ids, x, weights, experts):
    """Token t has slot t * min(K, M) + i at rank p for its i-th choice there."""
    local, (tokens, choices) = experts // RANKS, ids.shape
    per_token = min(choices, local)
    rank = ids // local
    earlier = jnp.arange(choices)[:, None] > jnp.arange(choices)[None, :]
    place = jnp.sum((rank[:, :, None] == rank[:, None, :]) & earlier[None], -1)
    slot = (rank * tokens + jnp.arange(tokens)[:, None]) * per_token + place
    sent = jnp.zeros((RANKS * tokens * per_token, x.shape[1]), x.dtype)
    sent = sent.at[slot.reshape(-1)].set(jnp.repeat(x, choices, axis=0))
    rows = library.all_to_all(sent, "rank", 0, 0, tiled=True)
    back = library.all_to_all(rows, "rank", 0, 0, tiled=True)
    return jnp.sum(back[slot] * weights[..., None], 1)


def ours(ids, x, weights, experts, capacity):
    routing = moe.route(ids, "rank", num_experts=experts, capacity=capacity)
    return moe.combine(moe.dispatch(x, routing), routing, weights)


def main(tokens, choices, experts, width):
    jax.config.update("jax_num_cpu_devices", RANKS)
    mesh = jax.make_mesh((RANKS,), ("rank",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh, P("rank"))
    ids = np.argsort(rng.random((RANKS * tokens, experts)), 1)[:, :choices].astype(np.int32)
    demand = np.bincount(ids.ravel() * RANKS // experts, minlength=RANKS).max()
    x = rng.standard_normal((RANKS * tokens, width)).astype(np.float32)
    weights = rng.random(ids.shape).astype(np.float32)
    arguments = [jax.device_put(a, sharding) for a in (ids, x, weights)]

    def program(body):
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"), check_vma=False))
        return lambda: jax.block_until_ready(f(*arguments))

    source = np.ones((RANKS * tokens * choices, width), np.float32)
    runs = {
        "jaxcomm.moe": program(lambda *a: ours(*a, experts, int(demand))),
        "all_to_all of jaxcomm": program(lambda *a: worst_case(jaxcomm, *a, experts)),
        "all_to_all of jax.lax": program(lambda *a: worst_case(lax, *a, experts)),
        "two copies of the rows": lambda: (source.copy(), source.copy()),
    }
    results = {name: np.asarray(run()) for name, run in runs.items() if "rows" not in name}
    for result in results.values():
        np.testing.assert_allclose(result, results["jaxcomm.moe"], rtol=1e-4, atol=1e-4)
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    print(f"T {tokens}, K {choices}, E {experts}, d {width}: {source.nbytes / 1e6:.0f} MB of rows each way")
    for name, values in times.items():
        print(f"  {name:24} {np.median(values):9.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (1024, 8, 64, 1024)))
