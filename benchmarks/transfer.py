"""jaxcomm.transfer beside jax.experimental.transfer: two processes of one host, in turn.

    python benchmarks/transfer.py [--rounds 15] [--json FILE]

Each row is the median of the rounds, and the median of the ratios of neighbours. `fetch` is jaxcomm.transfer.fetch of
one array to one device, from lease to jax.Array. `pages` is jaxcomm.transfer.pull of as many bytes in scattered cache
pages of 64 tokens. `jax` is a pull of jax.experimental.transfer that the source has announced before.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import jax
import numpy as np
from jax.experimental import transfer as jax_transfer
from jax.sharding import SingleDeviceSharding

from jaxcomm import transfer

SECRET = "only for this benchmark"
SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26]
HEADS, DIM = 8, 128
TOKEN_BYTES = 2 * HEADS * DIM * 2


def layout_of(size: int) -> transfer.PageLayout:
    """One layer; pages of 64 tokens, or one of as many as fit."""
    tokens = min(64, max(size // TOKEN_BYTES, 1))
    return transfer.PageLayout(layers=1, heads=HEADS, dim=DIM, dtype=np.uint16, page_tokens=tokens)


def jax_server():
    client = jax.local_devices()[0].client
    return jax_transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])


def scattered(pool: transfer.PagePool, count: int) -> list[int]:
    pages = pool.allocate(2 * count)
    pool.free(pages[1::2])
    return pages[::2]


def source() -> None:
    """Answers each line of standard input with one line."""
    with contextlib.ExitStack() as stack:
        endpoints = {
            path: stack.enter_context(transfer.Endpoint("source", secret=SECRET, shared_memory=path == "shm"))
            for path in ("shm", "tcp")
        }
        server = jax_server()
        arrays = {size: jax.device_put(np.arange(size // 4, dtype=np.float32)) for size in SIZES}
        pools = {}
        for path, endpoint in endpoints.items():
            for size, array in arrays.items():
                transfer.publish(endpoint, str(size), array, 1)
                count = -(-size // (layout_of(size).page_tokens * TOKEN_BYTES))
                pool = transfer.PagePool(endpoint, layout_of(size), 2 * count)
                pools[path, size] = pool, scattered(pool, count)
        print(json.dumps([{path: each.address for path, each in endpoints.items()}, server.address()]), flush=True)
        for line in sys.stdin:
            what, size, number = line.split()
            if what == "jax":
                server.await_pull(int(number), [arrays[int(size)]])
                print(flush=True)
            else:
                pool, pages = pools[what, int(size)]
                print(transfer.offer(pool, pages).ticket, flush=True)


def measure(rounds: int) -> list[dict]:
    job = subprocess.Popen([sys.executable, __file__, "--source"], stdin=-1, stdout=-1, text=True)
    assert job.stdin and job.stdout
    addresses, jax_address = json.loads(job.stdout.readline())

    def ask(*words) -> str:
        print(*words, file=job.stdin, flush=True)
        return job.stdout.readline().strip()

    device = SingleDeviceSharding(jax.local_devices()[0])
    server = jax_server()
    connection = server.connect(jax_address)
    numbers = iter(range(1, 1 << 30))
    rows = []
    with contextlib.ExitStack() as stack:
        readers = {
            path: stack.enter_context(transfer.Endpoint("reader", secret=SECRET, shared_memory=path == "shm"))
            for path in addresses
        }
        for size in SIZES:
            want = np.arange(size // 4, dtype=np.float32)
            pools = {
                path: transfer.PagePool(readers[path], layout_of(size), 2 * (size // 2048 + 1)) for path in readers
            }
            count = -(-size // (layout_of(size).page_tokens * TOKEN_BYTES))
            own = {path: scattered(pool, count) for path, pool in pools.items()}

            def by_jax(size=size):
                number = next(numbers)
                ask("jax", size, number)
                began = time.perf_counter()
                spec = jax.ShapeDtypeStruct((size // 4,), np.float32, sharding=device)
                (y,) = connection.pull(number, [spec])
                y.block_until_ready()
                return time.perf_counter() - began, y

            def by_fetch(path, size=size):
                began = time.perf_counter()
                group = transfer.Group(addresses[path])
                y = transfer.fetch(readers[path], group, str(size), 1, device).result()[""]
                y.block_until_ready()
                return time.perf_counter() - began, y

            def by_pages(path, size=size, pools=pools, own=own):
                ticket = ask(path, size, 0)
                began = time.perf_counter()
                transfer.pull(pools[path], ticket, own[path]).wait()
                return time.perf_counter() - began, None

            cases = {"jax": by_jax}
            for path in addresses:
                cases[f"fetch {path}"] = lambda path=path, run=by_fetch: run(path)
                cases[f"pages {path}"] = lambda path=path, run=by_pages: run(path)
            times: dict[str, list[float]] = {name: [] for name in cases}
            for each in range(rounds + 2):
                for name, run in cases.items():
                    seconds, y = run()
                    if y is not None and each == 0:
                        np.testing.assert_array_equal(y, want)
                    if each >= 2:  # the first two warm up
                        times[name].append(seconds)
            for name, seconds in times.items():
                ratio = statistics.median(j / own_s for j, own_s in zip(times["jax"], seconds, strict=True))
                median = statistics.median(seconds)
                rows.append(
                    {"bytes": size, "what": name, "us": median * 1e6, "GB/s": size / median / 1e9, "jax/x": ratio}
                )
    job.stdin.close()
    job.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        return source()
    rows = measure(options.rounds)
    print(f"{'bytes':>10} {'what':<10} {'us':>10} {'GB/s':>7} {'jax/x':>6}")
    for row in rows:
        print(f"{row['bytes']:>10} {row['what']:<10} {row['us']:>10.1f} {row['GB/s']:>7.2f} {row['jax/x']:>6.2f}")
    if options.json:
        record = {"command": " ".join(sys.argv), "jax": jax.__version__, "load_average": os.getloadavg(), "rows": rows}
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
