"""Cost of the flight recorder: python benchmarks/recorder.py.

One process measures chains of dependent ops on 8 devices. It stops and continues the recorder between rounds, in
alternating order, so that both kinds of rounds see the same machine. The cost is the median of the differences of
neighbouring rounds, with its 95 % interval by order statistics.
"""

import argparse
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomm
from jaxcomm import _core


def chain(op, length, mesh):
    """A jitted chain of `length` ops on blocks of 1 KiB."""

    def body(x):
        return lax.fori_loop(0, length, lambda _, y: op(y), x)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False))


def time_of(f, x, paused):
    _core.recorder.pause(paused)
    start = time.perf_counter()
    f(x).block_until_ready()
    return time.perf_counter() - start


def median_and_interval(samples):
    """Median and its 95 % interval."""
    ordered, n = np.sort(samples), len(samples)
    half = 0.98 * math.sqrt(n)
    return np.median(ordered), ordered[int(max(n / 2 - half, 0))], ordered[min(int(n / 2 + half), n - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=400, help="pairs of rounds")
    parser.add_argument("--length", type=int, default=200, help="ops of a chain")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = jax.make_mesh((options.devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    ops = {"psum": lambda y: jaxcomm.psum(y, "i") / options.devices, "barrier": lambda y: jaxcomm.barrier(y, "i")}
    for name, op in ops.items():
        f, x = chain(op, options.length, mesh), jnp.ones((options.devices, 256), jnp.float32)
        for _ in range(5):
            f(x).block_until_ready()
        off, on = [], []
        for number in range(options.rounds):
            for paused in (True, False) if number % 2 else (False, True):
                (off if paused else on).append(time_of(f, x, paused) / options.length)
        cost, low, high = median_and_interval(np.subtract(on, off))
        usual = np.median(off)
        print(
            f"{name}, 1 KiB, {options.devices} devices: {1e6 * usual:.2f} us without recorder, cost of it "
            f"{1e9 * cost:.0f} ns per call ({1e9 * low:.0f} to {1e9 * high:.0f}), {100 * cost / usual:.2f} %"
        )


if __name__ == "__main__":
    main()
