"""Prefill and decode of models/moe as two jobs, joined by jaxcomm.transfer.

    python -m examples.disaggregated.disaggregated [--tokens 32] [--timeline prefill.png]

The prefill job has the weights. The decode job fetches them, once. For each prompt, the prefill job fills the caches of
keys and values, and gives each layer to the decode job as soon as it has it. The decode job continues the text, and
compares it with that of one job alone.
"""

import argparse
import functools
import json
import pathlib
import secrets
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from examples.disaggregated.timeline import Bar, Mark, draw
from jaxcomm import transfer
from models.moe.config import Config
from models.moe.model import Cache, Transformer

PROMPTS = [b"import os\n\n\ndef ", b"class Cache(NamedTuple):\n    key: jax.Array\n", b"x"]
CONFIG = Config(layers=2, width=32, heads=4, hidden=32, experts=4, layout="1x1")
PAGES, PAGE_TOKENS = 8, 16
LAYOUT = transfer.PageLayout(
    layers=CONFIG.layers,
    heads=CONFIG.heads,
    dim=CONFIG.width // CONFIG.heads,
    dtype=np.float32,
    page_tokens=PAGE_TOKENS,
    order=("kv", "page", "token", "head", "dim"),
)


def make_model() -> Transformer:
    return Transformer(CONFIG, nnx.Rngs(0))


def structure() -> tuple[nnx.GraphDef, nnx.State]:
    """The model without its parameters, and their shapes."""
    return nnx.split(nnx.eval_shape(make_model))


def append_all(model: Transformer, text: jax.Array, count: jax.Array, caches: list[Cache]) -> list[Cache]:
    """The caches with the first `count` bytes of a text."""
    return jax.lax.fori_loop(
        0, count, lambda place, kept: model.append(text[place][None], place, kept, None)[1], caches
    )


def empty_caches() -> list[jax.Array]:
    return [jnp.zeros(LAYOUT.shape(PAGES), jnp.float32) for _ in range(CONFIG.layers)]


def as_caches(pages: list[jax.Array]) -> list[Cache]:
    """(kv, page, token, head, dim) -> keys and values of one sequence."""
    return [Cache(*layer.reshape(2, 1, PAGES * PAGE_TOKENS, *layer.shape[3:])) for layer in pages]


def as_pages(caches: list[Cache]) -> list[jax.Array]:
    return [jnp.stack(cache).reshape(LAYOUT.shape(PAGES)) for cache in caches]


@functools.partial(jax.jit, static_argnums=0)
def prefill(graphdef, params, text, count, handle, pages):
    """Fills the caches with the text before its last byte, and emits them layer by layer."""
    caches = append_all(nnx.merge(graphdef, params), text, count - 1, as_caches(empty_caches()))
    return [transfer.emit(x, handle, pages, layer, layout=LAYOUT) for layer, x in enumerate(as_pages(caches))]


def continued(model, text, count, tokens, caches):
    """The text with `tokens` more bytes, the likeliest ones."""

    def step(i, carry):
        text, caches = carry
        place = count - 1 + i
        scores, caches = model.append(text[place][None], place, caches, None)
        return text.at[place + 1].set(jnp.argmax(scores[0]).astype(jnp.int32)), caches

    return jax.lax.fori_loop(0, tokens, step, (text, caches))[0]


@functools.partial(jax.jit, static_argnums=(0, 4))
def decode(graphdef, params, text, count, tokens, handle, pages):
    """Continues a text whose caches another job has filled. It waits for each layer inside of the program."""
    caches = [transfer.insert(x, handle, pages, layer, layout=LAYOUT) for layer, x in enumerate(empty_caches())]
    return continued(nnx.merge(graphdef, params), text, count, tokens, as_caches(caches))


@functools.partial(jax.jit, static_argnums=(0, 4))
def alone(graphdef, params, text, count, tokens):
    """The same in one job."""
    model = nnx.merge(graphdef, params)
    caches = append_all(model, text, count - 1, as_caches(empty_caches()))
    return continued(model, text, count, tokens, caches)


def padded(prompt: bytes) -> jax.Array:
    text = np.zeros(PAGES * PAGE_TOKENS, np.int32)
    text[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    return jnp.asarray(text)


def prefill_job() -> None:
    """Prints its address. Then it answers each prompt on standard input with a ticket, and with its times."""
    secret = sys.stdin.readline().strip()
    graphdef, _ = structure()
    params = jax.jit(lambda: nnx.state(make_model()))()
    with transfer.Endpoint("prefill", secret=secret) as endpoint:
        transfer.publish(endpoint, "weights", params, version=0)
        pool = transfer.PagePool(endpoint, LAYOUT, num_pages=2 * PAGES)
        print(endpoint.address, flush=True)
        offers = []
        for line in sys.stdin:
            prompt = json.loads(line).encode()
            for offer, pages in [each for each in offers if each[0].done]:
                pool.free(pages)
                offers.remove((offer, pages))
            pages = pool.allocate(-(-len(prompt) // PAGE_TOKENS))
            offer = transfer.offer(pool, pages, tokens=len(prompt), streamed=True)
            offers.append((offer, pages))
            print(offer.ticket, flush=True)  # the reader may pull before the first layer is there
            begin = time.monotonic()
            emitted = prefill(graphdef, params, padded(prompt), len(prompt), offer.handle, np.arange(len(pages)))
            jax.block_until_ready(emitted)
            print(json.dumps([begin, time.monotonic()]), flush=True)


def decode_job(tokens: int, rounds: int) -> tuple[list[Bar], list[Mark]]:
    """Starts the prefill job, continues all prompts. Returns the times of the last round, which compiled nothing."""
    secret = secrets.token_hex(16)
    command = [sys.executable, "-m", __spec__.name, "--prefill"]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdin and job.stdout
    bars: list[Bar] = []
    marks: list[Mark] = []
    try:
        print(secret, file=job.stdin, flush=True)
        address = job.stdout.readline().strip()
        graphdef, expected = structure()
        device = SingleDeviceSharding(jax.devices()[0])
        with transfer.Endpoint("decode", secret=secret) as endpoint:
            shardings = jax.tree.map(lambda _: device, expected)
            params = transfer.fetch(endpoint, transfer.Group(address), "weights", "latest", shardings).result()
            pool = transfer.PagePool(endpoint, LAYOUT, num_pages=2 * PAGES)
            for number, prompt in enumerate(PROMPTS * rounds):
                if number % len(PROMPTS) == 0:
                    bars, marks = [], []
                print(json.dumps(prompt.decode()), file=job.stdin, flush=True)
                own = pool.allocate(-(-len(prompt) // PAGE_TOKENS))
                pull = transfer.pull(pool, job.stdout.readline().strip(), own)
                text, count = padded(prompt), len(prompt)
                begin = time.monotonic()
                written = decode(graphdef, params, text, count, tokens, pull.handle, np.arange(len(own)))
                for layer in range(CONFIG.layers):
                    pull.wait(layer)
                    marks.append(Mark("decode", time.monotonic(), ""))
                got = np.asarray(written)
                label = f"{len(prompt)} bytes"
                bars.append(Bar("prefill", *json.loads(job.stdout.readline()), label))
                bars.append(Bar("decode", begin, time.monotonic(), label))
                pool.free(own)
                want = np.asarray(alone(graphdef, params, text, count, tokens))
                assert (got == want).all(), f"another text than that of one job: {got} and {want}"
                print(f"{len(prompt)} bytes of prompt, {tokens} more: equal to one job's", flush=True)
    finally:
        job.stdin.close()
        job.wait(timeout=60)
        job.stdout.close()
    return bars, marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="bytes to generate (default: %(default)s)")
    parser.add_argument("--timeline", type=pathlib.Path, help="do all prompts twice, and draw the times of the second")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prefill:
        return prefill_job()
    if not 0 < options.tokens <= PAGES * PAGE_TOKENS - max(map(len, PROMPTS)):
        parser.error(f"--tokens: the cache has {PAGES * PAGE_TOKENS} places")
    bars, marks = decode_job(options.tokens, 2 if options.timeline else 1)
    if options.timeline:
        draw(bars, marks, options.timeline)


if __name__ == "__main__":
    main()
