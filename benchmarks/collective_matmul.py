"""Times the algorithms of all_gather_matmul and matmul_psum_scatter on CPU devices, in turns.

    python benchmarks/collective_matmul.py --json out.json
    python -m jaxcomm.run --processes 2 --devices 4 benchmarks/collective_matmul.py --json out.json

Each round runs every algorithm once, so that load from outside is spread over all of them. Times are medians over the
rounds, host to host, of the slowest process. The result and each derivative are separate programs. `lax` is the same
program with jax.lax.all_gather and jax.lax.psum_scatter. All results are compared with those of the first side before
timing.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.bench import records

SIDES = ("lax", "unfused", "ring")
# Rows of a block, width of the model, width of the hidden layer on one rank.
SHAPES = ("32x256x256", "128x512x512", "512x512x512")


def gather(side, x, w):
    if side == "lax":
        return lax.all_gather(x, "i", tiled=True) @ w
    return jaxcomm.all_gather_matmul(x, w, "i", algorithm=side)


def scatter(side, x, w):
    if side == "lax":
        return lax.psum_scatter(x @ w, "i", tiled=True)
    return jaxcomm.matmul_psum_scatter(x, w, "i", algorithm=side)


OPS = {"all_gather_matmul": gather, "matmul_psum_scatter": scatter}


# The derivatives that a program computes, of x (0) and w (1).
PROGRAMS = {"forward": (), "gradient for x": (0,), "gradient for w": (1,), "gradient": (0, 1)}


def program(op, side, mesh, name):
    """Returns f(x, w, cotangent), where the first dimension of all holds one row per rank."""

    def body(x, w, ct):
        operands = x[0], w[0]
        if name == "forward":
            return OPS[op](side, *operands)[None]

        def f(*moving):
            both = list(operands)
            for i, value in zip(PROGRAMS[name], moving, strict=True):
                both[i] = value
            return OPS[op](side, *both)

        grads = jax.vjp(f, *(operands[i] for i in PROGRAMS[name]))[1](ct[0])
        return jax.tree.map(lambda g: g[None], grads)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")))


def place(array, mesh):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P("i")), lambda index: array[index])


def agree(a, b):
    """Largest difference of two results, relative to the largest element."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        for one, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
            one, other = np.asarray(one.data), np.asarray(other.data)
            worst = max(worst, float(np.abs(one - other).max() / np.abs(other).max()))
    return worst


def slowest(times_us):
    if jax.process_count() == 1:
        return times_us
    return [float(t) for t in multihost_utils.process_allgather(np.array(times_us)).max(0)]


def measure(op, shape, mesh, name, sides, rounds):
    """One record per side."""
    m, k, f = shape
    n = mesh.size
    rng = np.random.default_rng(0)
    rows, out = (m, n * m) if op == "all_gather_matmul" else (n * m, m)
    operands = [place(rng.standard_normal((n, *size), np.float32), mesh) for size in ((rows, k), (k, f), (out, f))]
    programs = {side: program(op, side, mesh, name) for side in sides}
    results = {side: f(*operands) for side, f in programs.items()}
    errors = {side: agree(result, results[sides[0]]) for side, result in results.items()}
    if max(errors.values()) > 1e-4:
        raise SystemExit(f"{op} {shape}: results differ: {errors}")
    times = {side: [] for side in sides}
    for i in range(rounds):
        for side in [*sides[i % len(sides) :], *sides[: i % len(sides)]]:
            jax.block_until_ready(programs[side](*operands))  # untimed, so that each starts warm
            start = time.perf_counter()
            jax.block_until_ready(programs[side](*operands))
            times[side].append((time.perf_counter() - start) * 1e6)
    return [
        {"op": op, "mode": name, "rows": m, "k": k, "f": f, "side": side, "rounds": rounds, "error": errors[side],
         "time_us": statistics.median(slowest(times[side]))}
        for side in sides
    ]  # fmt: skip


def table(found, sides):
    """Markdown: one row per program; times in milliseconds, and the time of the first side divided by them."""
    lines = ["| op | program | m x k x f | " + " | ".join(sides) + " |", "|---|---|---|" + "---|" * len(sides)]
    for i in range(0, len(found), len(sides)):
        row = found[i : i + len(sides)]
        base = row[0]["time_us"]
        cells = [f"{base / 1e3:.2f} ms"]
        cells += [f"{r['time_us'] / 1e3:.2f} ms ({base / r['time_us']:.2f}x)" for r in row[1:]]
        shape = " x ".join(str(row[0][name]) for name in ("rows", "k", "f"))
        lines.append(f"| `{row[0]['op']}` | {row[0]['mode']} | {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="m x k x f, such as 128x512x512")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, default=8, help="of a program of one process")
    parser.add_argument("--json", type=pathlib.Path, help="file for the records")
    arguments = parser.parse_args()
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # jaxcomm.run sets it
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    jaxcomm.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))
    found = []
    for text in arguments.shapes:
        for op in OPS:
            for name in arguments.programs:
                found += measure(op, tuple(map(int, text.split("x"))), mesh, name, arguments.sides, arguments.rounds)
    if jax.process_index() == 0:
        print(table(found, arguments.sides))
        if arguments.json:
            parameters = {"processes": jax.process_count(), "devices": jax.device_count(), "rounds": arguments.rounds}
            context = records.context(sys.argv, parameters)
            arguments.json.write_text(json.dumps({"context": context, "records": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
