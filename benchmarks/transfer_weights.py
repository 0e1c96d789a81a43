"""Weights from a mesh of 2 x 4 devices of two processes to a mesh of four other processes, beside copies in memory.

    python benchmarks/transfer_weights.py [--mib 1024] [--rounds 5]

`fetch` is the time of the slowest reader from a barrier to its arrays. `copy` is that of four processes that copy as
many bytes at the same time inside of their memory, which has been touched before. The rounds alternate.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import transfer

SECRET = "only for this benchmark"
ARRAYS, ROWS = 16, 2048
WRITERS, READERS = 2, 4


def part(shape, index):
    """Elements of an array that has its own index in each."""
    rows, columns = (np.arange(*s.indices(n), dtype=np.int32) for s, n in zip(index, shape, strict=True))
    return rows[:, None] * shape[1] + columns


def shape_of(mib):
    return ROWS, (mib << 20) // (ARRAYS * ROWS * 4)


def write(folder, mib):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    shape, sharding = shape_of(mib), NamedSharding(mesh, P("data", "model"))
    with transfer.Endpoint(f"writer-{jax.process_index()}", secret=SECRET) as endpoint:
        make = jax.make_array_from_callback
        tree = {str(i): make(shape, sharding, lambda index: part(shape, index)) for i in range(ARRAYS)}
        transfer.publish(endpoint, "weights", tree, 1)
        own = folder / str(jax.process_index())
        own.with_suffix(".new").write_text(endpoint.address)
        own.with_suffix(".new").rename(own)
        while not (folder / "done").exists():
            time.sleep(0.05)


def slowest(run):
    multihost_utils.sync_global_devices("start")
    begin = time.perf_counter()
    run()
    own = np.float32(time.perf_counter() - begin)
    return float(multihost_utils.process_allgather(own).max())


def read(folder, mib, rounds):
    files = [folder / str(i) for i in range(WRITERS)]
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    group = transfer.Group(file.read_text() for file in files)
    shape, sharding = shape_of(mib), NamedSharding(Mesh(np.array(jax.devices()), ("model",)), P(None, "model"))
    source, destination = (np.ones((mib << 20) // READERS, np.uint8) for _ in range(2))
    times = []
    with transfer.Endpoint(f"reader-{jax.process_index()}", secret=SECRET) as endpoint:

        def fetch():
            target = dict.fromkeys(map(str, range(ARRAYS)), sharding)
            return transfer.fetch(endpoint, group, "weights", 1, target, timeout_s=600).result()

        for x in fetch().values():
            (shard,) = x.addressable_shards
            np.testing.assert_array_equal(shard.data, part(shape, shard.index))
        del x, shard
        for _ in range(rounds):
            times.append((slowest(fetch), slowest(lambda: np.copyto(destination, source))))
        stats = endpoint.stats()
    if jax.process_index() == 0:
        fetches, copies = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        print(f"{mib} MiB: fetch {fetches * 1e3:.0f} ms, copy {copies * 1e3:.0f} ms, median of the ratios {ratio:.2f}")
        print(f"over shared memory: {stats['tcp_received_bytes'] == 0}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is None:
        with tempfile.TemporaryDirectory() as folder:
            own = [__file__, *sys.argv[1:], "--folder", folder, "--job"]
            run = [sys.executable, "-m", "jaxcomm.run", "--timeout", "600"]
            writers = subprocess.Popen([*run, "-n", str(WRITERS), "--devices", "4", *own, "write"])
            try:
                subprocess.run([*run, "-n", str(READERS), "--devices", "1", *own, "read"], check=True)
            finally:
                pathlib.Path(folder, "done").touch()
                writers.wait()
        return
    jaxcomm.distributed.initialize()
    if options.job == "write":
        write(options.folder, options.mib)
    else:
        read(options.folder, options.mib, options.rounds)


if __name__ == "__main__":
    main()
