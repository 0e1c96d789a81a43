"""algorithm="xla_hierarchical" beside "xla": two hosts of network namespaces, one process on each, in turn.

    python benchmarks/two_levels.py [--devices 4] [--rate 5e7] [--bytes 1048576] [--rounds 7] [--json FILE]

`bytes` are those that a host has sent, as the kernel counts them, divided by those of the table of compositions in
docs/reference/algorithms.md. Where the link takes most of the time, its bytes predict it: `predicted` is the bytes of
"xla" divided by those of the table, `measured` the quotient of the medians of the times. Needs Linux and root.
"""

import argparse
import json
import statistics
import sys
import time

import on_hosts

RATE_BITS_PER_S, DELAY_S = 5e7, 0.2e-3


def table_bytes(op, size, devices):
    """Bytes that a host sends to the other one. `size`: bytes of the operand of a rank."""
    n = 2 * devices
    return (
        devices
        * {
            "all_to_all": size / 2,
            "all_gather": size,
            "psum": 2 * size / n,
            "psum_scatter": size / n,
            "pbroadcast": 2 * size / n,
        }[op]
    )


def measure(options):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxcomm

    jaxcomm.distributed.initialize()
    mesh, spec = jax.make_mesh((jax.device_count(),), ("i",)), PartitionSpec("i")
    n = jax.device_count()
    x = np.ones((n, options.bytes // 4), np.float32)
    operand = jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])
    calls = {
        "all_to_all": lambda x, **how: jaxcomm.all_to_all(x.reshape(n, -1), "i", 0, 0, tiled=True, **how),
        "all_gather": lambda x, **how: jaxcomm.all_gather(x, "i", tiled=True, **how),
        "psum": lambda x, **how: jaxcomm.psum(x, "i", **how),
        "psum_scatter": lambda x, **how: jaxcomm.psum_scatter(x.reshape(n, -1), "i", tiled=True, **how),
        "pbroadcast": lambda x, **how: jaxcomm.pbroadcast(x, "i", 0, **how),
    }
    rows = []
    for op, call in calls.items():
        runs = {
            algorithm: jax.jit(
                jax.shard_map(
                    lambda x, call=call, algorithm=algorithm: call(x, algorithm=algorithm),
                    mesh=mesh, in_specs=spec, out_specs=spec,
                )
            )
            for algorithm in ("xla", "xla_hierarchical")
        }  # fmt: skip
        times, sent = ({algorithm: [] for algorithm in runs} for _ in range(2))
        for each in range(options.rounds + 1):
            for algorithm, run in runs.items():
                before, began = on_hosts.link_bytes()[1], time.perf_counter()
                jax.block_until_ready(run(operand))
                if each > 0:  # the first one connects
                    times[algorithm].append(time.perf_counter() - began)
                    sent[algorithm].append(on_hosts.link_bytes()[1] - before)
        by_table = table_bytes(op, options.bytes, options.devices)
        flat_s, two_s = (statistics.median(times[algorithm]) for algorithm in runs)
        flat_bytes, two_bytes = (statistics.median(sent[algorithm]) for algorithm in runs)
        rows.append({
            "op": op, "xla ms": flat_s * 1e3, "two levels ms": two_s * 1e3, "xla bytes": flat_bytes / by_table,
            "two levels bytes": two_bytes / by_table, "predicted": flat_bytes / by_table, "measured": flat_s / two_s,
        })  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="of each host")
    parser.add_argument("--rate", type=float, default=RATE_BITS_PER_S, help="bits per second of each host")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of the operand of a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    if not on_hosts.is_host():
        sys.exit(on_hosts.run(2, options.rate, DELAY_S))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    rows = measure(options)
    if jax.process_index() > 0:
        return
    print(*(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print(*(f"{value:>17.2f}" if isinstance(value, float) else f"{value:>17}" for value in row.values()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"command": " ".join(sys.argv), "jax": jax.__version__, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
