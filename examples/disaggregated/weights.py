"""A trainer that publishes its weights, and two generators, joined by jaxcomm.transfer.

    python -m examples.disaggregated.weights [--every 20] [--timeline weights.png]

The trainer has a small model of text on a mesh of 2 x 2 devices. Every few steps it publishes the weights as a new
version. Two generators, of 2 devices each, fetch the versions and write text. One of them is killed and starts again.
At the end, the weights behind each text are compared with those that the trainer has published as that version.
"""

import argparse
import hashlib
import json
import pathlib
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.disaggregated.timeline import Bar, Mark, draw
from jaxcomm import transfer

Record = dict[str, Any]

PROMPT = b"import jax\n"
TOKENS = 32
CONTEXT, WIDTH, HIDDEN = 8, 32, 256  # bytes that the model sees, units per byte, hidden units
BATCH = 2048
LIMIT_S = 300.0

Params = dict[str, jax.Array]


def report(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def init() -> Params:
    shapes = {"embed": (256, WIDTH), "up": (CONTEXT * WIDTH, HIDDEN), "down": (HIDDEN, 256)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(key, shapes[name]) / 16 for name, key in zip(shapes, keys, strict=True)}


def scores(params: Params, context: jax.Array) -> jax.Array:
    """(b, CONTEXT) bytes -> (b, 256), of the byte that follows."""
    seen = params["embed"][context].reshape(len(context), -1)
    return jnp.tanh(seen @ params["up"]) @ params["down"]


@jax.jit
def step(params: Params, windows: jax.Array) -> tuple[Params, jax.Array]:
    """A step of gradient descent on (b, CONTEXT + 1) bytes."""

    def loss(params: Params) -> jax.Array:
        chances = jax.nn.log_softmax(scores(params, windows[:, :-1]))
        return -jnp.take_along_axis(chances, windows[:, -1:], axis=1).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda x, dx: x - 0.5 * dx, params, gradient), value


@jax.jit
def continued(params: Params, text: jax.Array) -> jax.Array:
    """Replaces the bytes of a text after the prompt by the likeliest ones."""

    def write(place: jax.Array, text: jax.Array) -> jax.Array:
        context = jax.lax.dynamic_slice(text, (place - CONTEXT,), (CONTEXT,))
        return text.at[place].set(jnp.argmax(scores(params, context[None])[0]).astype(text.dtype))

    return jax.lax.fori_loop(len(PROMPT), len(text), write, text)


def digest(params: Params) -> str:
    """Of all elements, whatever the shardings."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def trainer_job(every: int, secret: str) -> None:
    """Trains and publishes until its input ends. It never waits for a reader."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    params = jax.device_put(init(), NamedSharding(mesh, P("data", "model")))
    source = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    random = np.random.default_rng(0)

    def windows() -> jax.Array:
        starts = random.integers(0, len(source) - CONTEXT, BATCH)
        return jax.device_put(source[starts[:, None] + np.arange(CONTEXT + 1)], NamedSharding(mesh, P("data")))

    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    version = 0
    with transfer.Endpoint("trainer", secret=secret) as endpoint:
        report(address=endpoint.address)
        while not ended.is_set():
            begin = time.monotonic()
            for _ in range(every):
                params, loss = step(params, windows())
            version += every
            record = {"what": "train", "version": version, "loss": float(loss), "digest": digest(params)}
            report(**record, begin=begin, end=time.monotonic())
            transfer.publish(endpoint, "weights", params, version, keep=2)


def generator_job(name: str, secret: str, address: str) -> None:
    """Writes text with the newest weights until the trainer leaves. It writes on while the next ones arrive."""
    own = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), P(None, "model"))
    writers = transfer.Group(address)
    text = np.frombuffer(PROMPT.ljust(len(PROMPT) + TOKENS), np.uint8)
    serving: tuple[int, Params] | None = None

    def generate(version: int, params: Params) -> None:
        begin = time.monotonic()
        written = np.asarray(continued(params, text)).tobytes()
        record = {"what": "generate", "version": version, "digest": digest(params), "text": written.decode("latin1")}
        report(**record, begin=begin, end=time.monotonic())

    with transfer.Endpoint(name, secret=secret) as endpoint:
        try:
            for version in transfer.watch(endpoint, writers, "weights", timeout_s=LIMIT_S):
                shardings = dict.fromkeys(("embed", "up", "down"), own)
                future = transfer.fetch(endpoint, writers, "weights", version, shardings, timeout_s=LIMIT_S)
                while serving and not future.done():
                    generate(*serving)
                try:
                    serving = version, future.result()
                except transfer.VersionGone:
                    continue  # a later one is there
                generate(*serving)
        except transfer.PeerLost:
            report(what="trainer has left")


class Job:
    """A process, and the records that it has printed."""

    def __init__(self, name: str, arguments: list[str], first_line: Record, arrived: "queue.Queue[Job]") -> None:
        self.name, self.records, self.killed = name, list[Record](), False
        command = [sys.executable, "-m", __spec__.name, "--job", name, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        print(json.dumps(first_line), file=self.process.stdin, flush=True)
        self._output, self._arrived = self.process.stdout, arrived
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            if line.endswith("\n"):  # else the process was killed in the middle
                self.records.append(json.loads(line))
            self._arrived.put(self)
        self._arrived.put(self)

    def versions(self) -> list[int]:
        """Those with which it has written text."""
        return [record["version"] for record in self.records if record.get("what") == "generate"]

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Ends its input, and waits for it. Returns its status."""
        assert self.process.stdin
        self.process.stdin.close()
        status = self.process.wait(LIMIT_S)
        self._reader.join()
        self._output.close()
        return status


def run(every: int) -> tuple[list[Job], list[Mark]]:
    """One trainer and two generators, the second of which is killed and starts again."""
    secret, arrived = secrets.token_hex(16), queue.Queue[Job]()
    deadline = time.monotonic() + LIMIT_S
    jobs: list[Job] = []

    def start(name: str, arguments: list[str], **first_line: str) -> Job:
        jobs.append(Job(name, arguments, {"secret": secret, **first_line}, arrived))
        return jobs[-1]

    def wait(what: str, condition: Callable[[], bool]) -> None:
        while not condition():
            try:
                job = arrived.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise TimeoutError(f"{what}: not within {LIMIT_S} s") from None
            if job.process.poll() and not job.killed:
                raise RuntimeError(f"{job.name} has ended with status {job.process.returncode}, before {what}")

    try:
        trainer = start("trainer", ["--every", str(every)])
        wait("the trainer's address", lambda: bool(trainer.records))
        address = trainer.records[0]["address"]
        first, second = (start(f"generator-{i}", [], address=address) for i in range(2))
        wait("two versions at both", lambda: all(len(set(job.versions())) >= 2 for job in (first, second)))
        marks = [Mark("generator-1: serves", time.monotonic(), "killed")]
        second.kill()
        last = max(second.versions())
        wait("later versions at the other one", lambda: len({v for v in first.versions() if v > last}) >= 4)
        marks.append(Mark("generator-1: serves", time.monotonic(), "starts again"))
        third = start("generator-1", [], address=address)
        wait("two versions after the restart", lambda: len(set(third.versions())) >= 2)
        for job in (trainer, first, third):
            status = job.end()
            assert status == 0, f"{job.name} has ended with status {status}"
    finally:
        for job in jobs:
            job.process.kill()
    return jobs, marks


def check(jobs: list[Job]) -> None:
    """Compares each text's weights with those of the trainer, and prints what was compared."""
    trainer, *generators = jobs
    published = {record["version"]: record["digest"] for record in trainer.records if "digest" in record}
    for job in generators:
        texts = [record for record in job.records if record.get("what") == "generate"]
        for record in texts:
            assert record["digest"] == published[record["version"]], f"{job.name}: other weights: {record}"
        versions = job.versions()
        assert versions == sorted(versions), f"{job.name} went back to an older version: {versions}"
        print(f"{job.name}: {len(texts)} texts, {len(set(versions))} versions, each equal to the trainer's", flush=True)


def bars(jobs: list[Job]) -> list[Bar]:
    """When the trainer trained which version, and how long each generator served it."""
    trainer, *generators = jobs
    found = [
        Bar("trainer: trains", record["begin"], record["end"], str(record["version"]))
        for record in trainer.records
        if "digest" in record
    ]
    for job in generators:
        texts = [record for record in job.records if record.get("what") == "generate"]
        firsts = {record["version"]: record["begin"] for record in reversed(texts)}
        begins = sorted(firsts.values())
        ends = [*begins[1:], texts[-1]["end"]]
        found += [
            Bar(f"{job.name}: serves", begin, end, str(version))
            for version, begin, end in zip(sorted(firsts), begins, ends, strict=True)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=20, help="steps between versions (default: %(default)s)")
    parser.add_argument("--timeline", type=pathlib.Path, help="draw when each process did what")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.every < 1:
        parser.error("--every: at least 1")
    if options.job is None:
        jobs, marks = run(options.every)
        check(jobs)
        if options.timeline:
            draw(bars(jobs), marks, options.timeline)
        return
    jax.config.update("jax_num_cpu_devices", 4 if options.job == "trainer" else 2)
    first_line = json.loads(sys.stdin.readline())
    if options.job == "trainer":
        trainer_job(options.every, first_line["secret"])
    else:
        generator_job(options.job, first_line["secret"], first_line["address"])


if __name__ == "__main__":
    main()
