"""jaxcomm.transfer beside jax.experimental.transfer: two processes of one host, in turn.

    python benchmarks/transfer.py [--rounds 15] [--sizes BYTES ...] [--json FILE] [--layers]

Each row is the median of the rounds, their best, the median of the ratios of a round, and the ratio of the best. What
comes right after a pull of `jax` finds its threads at work and the caches empty, so each round begins with another one.
`copy` is numpy.copyto, and the least that any of them needs: one copy between memory that has been touched before.
`fetch` is jaxcomm.transfer.fetch of one array to one device, from lease to jax.Array. `pages` is jaxcomm.transfer.pull
of as many bytes in scattered cache pages of 64 tokens. `jax` is a pull of jax.experimental.transfer that the source has
announced before.

--layers: the exposed time of a pull of 16 layers of 4 MiB: what a loop that waits for each layer and computes with it
takes beyond its computation. That of a layer takes a fraction of the time of its transfer. It sleeps, as if another
device computed, or spins on a processor. `predicted` is T / layers + chunk if the transfer of a layer takes at most its
computation, else T - computation + T / layers. T is the time of a pull without computation, just before.
"""

import argparse
import contextlib
import itertools
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
LAYERS = transfer.PageLayout(layers=16, heads=HEADS, dim=DIM, dtype=np.uint16, page_tokens=64)
LAYER_PAGES = 16
CHUNK_BYTES = 512 << 10  # that an endpoint sends at a time


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
            pool = transfer.PagePool(endpoint, LAYERS, 2 * LAYER_PAGES)
            pools[path, 0] = pool, scattered(pool, LAYER_PAGES)
        print(json.dumps([{path: each.address for path, each in endpoints.items()}, server.address()]), flush=True)
        for line in sys.stdin:
            what, size, number = line.split()
            if what == "jax":
                server.await_pull(int(number), [arrays[int(size)]])
                print(flush=True)
            else:
                pool, pages = pools[what, int(size)]
                print(transfer.offer(pool, pages).ticket, flush=True)


@contextlib.contextmanager
def source_job():
    """The first line of a source, and a function that asks it."""
    job = subprocess.Popen([sys.executable, __file__, "--source"], stdin=-1, stdout=-1, text=True)
    assert job.stdin and job.stdout

    def ask(*words) -> str:
        print(*words, file=job.stdin, flush=True)
        return job.stdout.readline().strip()

    yield json.loads(job.stdout.readline()), ask
    job.stdin.close()
    job.wait()


def compute(seconds: float, spins: bool) -> float:
    """Takes some time, and returns how much."""
    began = time.perf_counter()
    if not spins:
        time.sleep(seconds)
    while time.perf_counter() - began < seconds:
        pass
    return time.perf_counter() - began


def measure_layers(rounds: int) -> list[dict]:
    cases = [(path, spins, ratio) for path in ("shm", "tcp") for spins in (False, True) for ratio in (0.5, 1.0, 2.0)]
    exposed: dict[tuple, list[float]] = {case: [] for case in cases}
    predicted: dict[tuple, list[float]] = {case: [] for case in cases}
    whole: dict[str, list[float]] = {"shm": [], "tcp": []}
    with source_job() as (_, ask), contextlib.ExitStack() as stack:
        pools = {}
        for path in whole:
            endpoint = transfer.Endpoint("reader", secret=SECRET, shared_memory=path == "shm")
            pool = transfer.PagePool(stack.enter_context(endpoint), LAYERS, 2 * LAYER_PAGES)
            pools[path] = pool, scattered(pool, LAYER_PAGES)

        def run(path: str, layer_s: float, spins: bool) -> tuple[float, float]:
            """Times of a pull with its computation, and of the computation."""
            pool, pages = pools[path]
            ticket = ask(path, 0, 0)
            began, computed_s = time.perf_counter(), 0.0
            pull = transfer.pull(pool, ticket, pages)
            for layer in range(LAYERS.layers):
                pull.wait(layer)
                computed_s += compute(layer_s, spins) if layer_s else 0.0
            return time.perf_counter() - began, computed_s

        for each in range(rounds + 2):
            for path, spins, ratio in cases:
                transfer_s, _ = run(path, 0.0, False)
                total_s, computed_s = run(path, ratio * transfer_s / LAYERS.layers, spins)
                if each < 2:  # warms up
                    continue
                layer_s = transfer_s / LAYERS.layers
                chunk_s = layer_s * CHUNK_BYTES / (LAYER_PAGES * LAYERS.page_tokens * TOKEN_BYTES)
                late_s = transfer_s - computed_s + layer_s
                whole[path].append(transfer_s)
                exposed[path, spins, ratio].append(total_s - computed_s)
                predicted[path, spins, ratio].append(layer_s + chunk_s if computed_s >= transfer_s else late_s)
    return [
        {
            "what": f"{path} {'spins' if spins else 'sleeps'}",
            "compute/transfer": ratio,
            "transfer_us": statistics.median(whole[path]) * 1e6,
            "exposed_us": statistics.median(exposed[path, spins, ratio]) * 1e6,
            "predicted_us": statistics.median(predicted[path, spins, ratio]) * 1e6,
            "exposed/transfer": statistics.median(exposed[path, spins, ratio]) / statistics.median(whole[path]),
        }
        for path, spins, ratio in cases
    ]


def measure(rounds: int, sizes: list[int]) -> list[dict]:
    device = SingleDeviceSharding(jax.local_devices()[0])
    server = jax_server()
    numbers = iter(range(1, 1 << 30))
    rows = []
    with source_job() as ((addresses, jax_address), ask), contextlib.ExitStack() as stack:
        connection = server.connect(jax_address)
        readers = {
            path: stack.enter_context(transfer.Endpoint("reader", secret=SECRET, shared_memory=path == "shm"))
            for path in addresses
        }
        for size in sizes:
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

            copies = itertools.cycle([(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(4)])

            def by_copy(copies=copies):
                pair = next(copies)
                began = time.perf_counter()
                np.copyto(*pair)
                return time.perf_counter() - began, None

            cases = {"jax": by_jax, "copy": by_copy}
            for path in addresses:
                cases[f"fetch {path}"] = lambda path=path, run=by_fetch: run(path)
                cases[f"pages {path}"] = lambda path=path, run=by_pages: run(path)
            times: dict[str, list[float]] = {name: [] for name in cases}
            for each in range(rounds + 2):
                first = each % len(cases)
                for name in [*cases, *cases][first : first + len(cases)]:
                    seconds, y = cases[name]()
                    if y is not None and each == 0:
                        np.testing.assert_array_equal(y, want)
                    if each >= 2:  # the first two warm up
                        times[name].append(seconds)
            for name, seconds in times.items():
                ratio = statistics.median(j / own_s for j, own_s in zip(times["jax"], seconds, strict=True))
                median = statistics.median(seconds)
                best = min(times["jax"]) / min(seconds)
                row = {"bytes": size, "what": name, "us": median * 1e6, "best us": min(seconds) * 1e6}
                rows.append(row | {"GB/s": size / median / 1e9, "jax/x": ratio, "best jax/x": best})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--json")
    parser.add_argument("--layers", action="store_true", help="measure exposed times of layers")
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        return source()
    rows = measure_layers(options.rounds) if options.layers else measure(options.rounds, options.sizes)
    print(*(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print(*(f"{value:>16.2f}" if isinstance(value, float) else f"{value:>16}" for value in row.values()))
    if options.json:
        record = {"command": " ".join(sys.argv), "jax": jax.__version__, "load_average": os.getloadavg(), "rows": rows}
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
