"""What test_calibration.py runs in every process: calibrates, then measures what it has not calibrated with."""

import itertools
import json
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxcomm

CHAIN, REPETITIONS = 4, 15
# Neither sizes nor algorithms are those that calibrate() measures: the selection chooses.
CELLS = [("psum", 3 << 8), ("psum", 3 << 14), ("psum", 3 << 18), ("psum", 3 << 20), ("ppermute", 3 << 17),
         ("all_to_all", 3 << 10), ("all_to_all", 3 << 14), ("all_to_all", 3 << 18)]  # fmt: skip


def body(op, n):
    def chain(x):
        for _ in range(CHAIN):
            if op == "psum":
                x = jaxcomm.psum(x, "i")
            elif op == "ppermute":
                x = jaxcomm.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)])
            else:
                x = jaxcomm.all_to_all(x.reshape(n, -1), "i", 0, 0).reshape(x.shape)
        return x

    return chain


def explain(n, op, num_bytes):
    operand = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.int32)
    return jaxcomm.explain(op, operand, n, scope="network", ranks_per_node=1)


def measure(mesh, op, num_bytes):
    n = mesh.size
    f = jax.jit(jax.shard_map(body(op, n), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    x = jax.jit(lambda: jnp.ones(n * num_bytes // 4, jnp.int32), out_shardings=jax.NamedSharding(mesh, P("i")))()
    times = []
    for _ in range(REPETITIONS + 2):
        begin = time.perf_counter()
        jax.block_until_ready(f(x))
        times.append((time.perf_counter() - begin) / CHAIN)
    explained = explain(n, op, num_bytes)
    return {
        "op": op, "bytes": num_bytes, "algorithm": explained.algorithm, "predicted_s": explained.predicted_time_s,
        "measured_s": statistics.median(times[2:]),
    }  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    )
    mesh = jaxcomm.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    before = jaxcomm.topology()
    calibration = jaxcomm.calibrate()
    cells = [measure(mesh, *cell) for cell in CELLS]
    # Of larger groups too: they have more to choose from.
    groups = itertools.product(("psum", "all_to_all", "all_gather", "pbroadcast"), (mesh.size, 5, 8, 16), range(4, 20))
    choices = [
        f"{op} of {n << log_size} bytes, {n} ranks: {explain(n, op, n << log_size).algorithm}"
        for op, n, log_size in groups
    ]
    if jax.process_index() == 0:
        print(json.dumps({
            "calibrated_before": before.calibrated, "calibrated": jaxcomm.topology().calibrated, "cells": cells,
            "choices": choices,
            "table": str(calibration), "topology": str(jaxcomm.topology()),
        }), flush=True)  # fmt: skip
    sys.stdin.readline()
    os._exit(0)
