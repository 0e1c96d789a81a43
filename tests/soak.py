"""Random collectives for minutes, with ranks that are late or stopped. Checks all bytes and the growth of resources.

    python -m jaxcomm.run --processes 2 --devices 4 tests/soak.py --collectives 200000 --stops 2

The seed determines the programs and their order, so they are equal in all processes. Programs are chains of collectives
in loops, over different ops, algorithms, element types, sizes, meshes and groups. Several launches are in flight, each
with new data. Results must equal those of NumPy bit by bit; integers wrap around in both.
"""

import argparse
import collections
import ctypes
import dataclasses
import functools
import os
import random
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from usage import usage

import jaxcomm

OPS = (
    "all_to_all", "all_gather", "psum", "pmax", "pmin", "psum_scatter", "ppermute", "pbroadcast", "barrier",
    "ragged_all_to_all", "moe",
)  # fmt: skip
GROUPED = OPS[:6]  # accept axis_index_groups; so does barrier, which has no values to check
OF_ROWS = OPS[-2:]
DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
IN_FLIGHT = 12  # launches; beyond 32 XLA:CPU 0.10 runs out of threads
WARM = 3  # iterations over all programs before resources are counted
LONGEST_STOP_S = 0.5
REPORT_EVERY_S = 10

# Allowed growth after the warm-up. The allocator creates and drops mappings.
MAX_GROWTH = {"private KiB": 5 << 10, "shared KiB": 5 << 10, "descriptors": 0, "threads": 0, "mappings": 40}

# Stops its parent at random times: <pid> <seed> <mean seconds between>.
STOPPER = f"""
import os, random, signal, sys, time
pid, choose, mean_s = int(sys.argv[1]), random.Random(sys.argv[2]), float(sys.argv[3])
while True:
    time.sleep(choose.expovariate(1 / mean_s))
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        if os.getppid() != pid:
            sys.exit()
        os.kill(pid, signum)
        if signum == signal.SIGSTOP:
            time.sleep(choose.uniform(0.01, {LONGEST_STOP_S}))
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective of a chain; `more` has the arguments specific to the op."""

    op: str
    axes: tuple
    group_size: int
    groups: list | None
    algorithm: str | None
    more: dict

    def combine(self, x, y, i):
        """Combines operand and result, so that no later sum hides an earlier wrong value."""
        if self.op == "all_gather":
            y = (y * (2 * np.arange(self.group_size)[:, None] + 1).astype(x.dtype)).sum(0, dtype=x.dtype)
        elif self.op == "psum_scatter":
            y = (jnp if isinstance(y, jax.Array) else np).tile(y, self.group_size)
        return x * 5 + y * 3 + i

    def exchange_rows(self, x):
        """A block is a row per rank. ragged_all_to_all sends some of them, and moe gives each to some experts."""
        own = lax.axis_index(self.axes)
        rows = x.reshape(self.group_size, -1)
        if self.op == "ragged_all_to_all":
            vectors = [jnp.asarray(v)[own] for v in self.more["vectors"]]
            return jaxcomm.ragged_all_to_all(
                rows, rows + x.dtype.type(1), *vectors, axis_name=self.axes, algorithm=self.algorithm
            ).reshape(-1)
        ids = jnp.asarray(self.more["ids"])[own]
        rows, routing = jaxcomm.moe.route_and_dispatch(
            rows, ids, self.axes, num_experts=2 * self.group_size, capacity=self.more["capacity"],
            algorithm=self.algorithm,
        )  # fmt: skip
        rows = rows * (2 * own + 1).astype(x.dtype)  # the rank is that of the expert
        algorithm = None if self.algorithm == "one_shot" else self.algorithm
        return jaxcomm.moe.combine(rows, routing, algorithm=algorithm).reshape(-1)

    def expect_rows(self, blocks):
        rows = [x.reshape(self.group_size, -1) for x in blocks]
        if self.op == "ragged_all_to_all":
            outputs = [x + x.dtype.type(1) for x in rows]
            return [y.reshape(-1) for y in reference.ragged_all_to_all(rows, outputs, *self.more["vectors"][:3])]
        ids = self.more["ids"]
        factors = np.where(ids < 0, 0, ids // 2 * 2 + 1).sum(-1)
        return [(x * f[:, None].astype(x.dtype)).reshape(-1) for x, f in zip(rows, factors, strict=True)]

    def call(self, x, i):
        if self.op in OF_ROWS:
            return self.combine(x, self.exchange_rows(x), i)
        options = {} if self.groups is None else {"axis_index_groups": self.groups}
        if self.op == "all_to_all":
            options |= {"split_axis": 0, "concat_axis": 0}
        y = getattr(jaxcomm, self.op)(x, self.axes, algorithm=self.algorithm, **options, **self.more)
        return self.combine(x, y, i)

    def expect(self, x, sizes, i):
        def oracle(blocks, **options):
            if self.op in OF_ROWS:
                return [self.combine(x, y, i) for x, y in zip(blocks, self.expect_rows(blocks), strict=True)]
            if self.op == "all_to_all":
                options |= {"split_axis": 0, "concat_axis": 0}
            results = getattr(reference, self.op)(blocks, **options, **self.more)
            return [self.combine(x, y, i) for x, y in zip(blocks, results, strict=True)]

        return reference.on_mesh(oracle, x, sizes, self.axes, self.groups)


def random_step(choose, sizes):
    axes = tuple(
        choose.choice([[name] for name in sizes] + ([list(sizes), list(sizes)[::-1]] if len(sizes) > 1 else []))
    )
    n = int(np.prod([sizes[a] for a in axes]))
    op, groups, more = choose.choice(OPS), None, {}
    order = choose.sample(range(n), n)
    if op in GROUPED and len(axes) == 1 and n > 1 and choose.random() < 0.3:
        size = choose.choice([d for d in range(2, n + 1) if n % d == 0])
        groups = [order[i : i + size] for i in range(0, n, size)]
        n = size
    if op in ("all_to_all", "psum_scatter"):
        more = {"tiled": True}
    elif op == "ppermute":
        more = {"perm": list(zip(order, range(choose.randint(1, n)), strict=False))}
    elif op == "pbroadcast":
        more = {"source": choose.randrange(n)}
    elif op in OF_ROWS:
        more = random_rows(op, np.random.default_rng(choose.randrange(1 << 30)), n)
    return Step(op, axes, n, groups, choose.choice(algorithms(op)), more)


def algorithms(op):
    if op == "moe":
        return [None, "one_shot", *jaxcomm.algorithms("moe.dispatch")]
    return [None, *jaxcomm.algorithms(op)]


def random_rows(op, rng, n):
    if op == "ragged_all_to_all":  # at most one row for each pair, from any row and to different ones
        sizes = rng.integers(0, 2, (n, n)).astype(np.int32)
        places = np.stack([rng.permutation(n) for _ in range(n)], 1).astype(np.int32)
        return {"vectors": (rng.integers(0, n, (n, n)).astype(np.int32), sizes, places, sizes.T.copy())}
    ids = rng.integers(-1, 2 * n, (n, n, 2)).astype(np.int32)
    if rng.random() < 0.3:  # one hot rank
        ids %= 2
    return {"ids": ids, "capacity": int(np.bincount(ids[ids >= 0] // 2, minlength=n).max(initial=1))}


def random_mesh(choose, devices):
    """All or some devices, mostly of all processes, in any order."""
    kind = choose.choice(["line", "grid", "grid", "some", "some", "own"])
    devices = list(devices)
    if kind in ("line", "some") or choose.random() < 0.3:
        choose.shuffle(devices)
    if kind == "grid":
        return Mesh(np.array(devices).reshape(2, -1), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    if kind == "some":
        devices = devices[: choose.randrange(2, len(devices))]
    if kind == "own":
        process = choose.randrange(jax.process_count())
        devices = [d for d in devices if d.process_index == process]
    return Mesh(np.array(devices), ("i",), axis_types=(AxisType.Auto,))


class Program:
    """A chain of collectives in a loop."""

    def __init__(self, seed, number):
        choose = random.Random(f"{seed} program {number}")
        self.mesh = random_mesh(choose, jax.devices())
        self.sizes = dict(self.mesh.shape)
        self.steps = [random_step(choose, self.sizes) for _ in range(choose.randint(1, 3))]
        self.dtype = np.dtype(choose.choice(DTYPES))
        # A few elements, pages, more than one thread copies at a time; always blocks for every rank of a group.
        blocks, self.trips = choose.choice([(1, 40), (3, 40), (61, 30), (1000, 12), (1021, 12), (16381, 3), (65536, 1)])
        self.count = blocks * self.mesh.size
        self.donates = choose.random() < 0.5
        self.sharding = NamedSharding(self.mesh, P(self.mesh.axis_names))
        self.here = any(d.process_index == jax.process_index() for d in self.mesh.devices.flat)
        self.num_collectives = self.trips * len(self.steps)
        while self.here:  # until all algorithms support their groups; all processes draw the same numbers
            try:
                jax.block_until_ready(self.launch(*self.operands(seed, -1)))
                break
            except ValueError:
                del self.compiled
                self.steps = [dataclasses.replace(s, algorithm=choose.choice(algorithms(s.op))) for s in self.steps]

    def __str__(self):
        devices = [d.id for d in self.mesh.devices.flat]
        return (f"{self.trips} times {self.steps} on {self.count} x {self.dtype} of devices {devices} as {self.sizes}, "
                f"donated: {self.donates}")  # fmt: skip

    def operands(self, seed, number):
        """Rows, and how long which rank waits in which trip: (row, (turns, trip, 0))."""
        rng = np.random.default_rng((seed, number + 1))
        n = self.mesh.size
        rows = np.frombuffer(rng.bytes(n * self.count * self.dtype.itemsize), self.dtype).reshape(n, self.count)
        late = np.zeros((n, 3), np.int32)
        if rng.random() < 0.2:
            late[rng.integers(n)] = rng.integers(3000), rng.integers(self.trips), 0
        return rows, late

    @functools.cached_property
    def compiled(self):
        def body(x, late):
            def trip(i, x):
                # Ends with the initial 0, which the compiler can't derive.
                turns = jnp.where(i == late[0, 1], late[0, 0], 0)
                x = x + lax.fori_loop(0, turns, lambda _, z: z * 3, late[0, 2]).astype(x.dtype)
                for step in self.steps:
                    x = step.call(x, i.astype(x.dtype))
                return x

            return lax.fori_loop(0, self.trips, trip, x[0])[None]

        specs = P(self.mesh.axis_names)
        f = jax.shard_map(body, mesh=self.mesh, in_specs=(specs, specs), out_specs=specs, check_vma=False)
        return jax.jit(f, donate_argnums=0 if self.donates else ())

    def launch(self, rows, late):
        return self.compiled(*(
            jax.make_array_from_callback(x.shape, self.sharding, lambda index, x=x: x[index]) for x in (rows, late)
        ))  # fmt: skip

    def wrong(self, rows, result):
        """Describes the wrong shards of this process."""
        x = rows.reshape(*self.sizes.values(), -1)
        for i in range(self.trips):
            for step in self.steps:
                x = step.expect(x, self.sizes, self.dtype.type(i))
        want = x.reshape(rows.shape)
        for shard in result.addressable_shards:
            got, wanted = np.asarray(shard.data)[0], want[shard.index][0]
            at = np.flatnonzero(got != wanted)
            if len(at):
                return (f"device {shard.device.id}: {len(at)} of {self.count} elements differ, from {at[0]} to "
                        f"{at[-1]}: {got[at[:8]]} instead of {wanted[at[:8]]}")  # fmt: skip
        return ""


def fail(*lines):
    print(*lines, sep="\n", flush=True)
    os._exit(1)  # at once, so that the launcher ends the others; JAX's own exit would wait for them


class Soak:
    def __init__(self, seed, num_programs):
        self.seed, self.programs = seed, [Program(seed, number) for number in range(num_programs)]
        self.own = random.Random(f"{seed} process {jax.process_index()}")
        self.number = self.num_collectives = 0  # of launches; of collectives
        self.pending = collections.deque()

    def launch(self, program):
        self.num_collectives += program.num_collectives
        self.number += 1
        if not program.here:
            return
        rows, late = program.operands(self.seed, self.number)
        self.pending.append((self.number, program, rows, program.launch(rows, late)))
        if self.own.random() < 0.03:
            time.sleep(self.own.random() * 0.02)

    def check(self, most_pending):
        while len(self.pending) > most_pending:
            number, program, rows, result = self.pending.popleft()
            try:
                wrong = program.wrong(rows, result)
            except jax.errors.JaxRuntimeError as error:
                wrong = str(error)
            if wrong:
                fail(f"wrong, with --seed {self.seed}, in launch {number}: {wrong}", str(program))

    def run(self, num_collectives):
        begin = told = time.monotonic()
        for i in range(WARM * len(self.programs)):
            self.launch(self.programs[i % len(self.programs)])
            self.check(IN_FLIGHT)
        self.check(0)
        warm, self.num_collectives = usage(), 0
        print(f"warm after {time.monotonic() - begin:.0f} s: {warm}", flush=True)
        while self.num_collectives < num_collectives:
            choose = random.Random(f"{self.seed} launch {self.number}")
            self.launch(choose.choice(self.programs))
            self.check(choose.randint(0, IN_FLIGHT))
            if time.monotonic() - told > REPORT_EVERY_S:
                told = time.monotonic()
                self.check(0)
                print(f"{self.num_collectives} of {num_collectives} in {told - begin:.0f} s: {usage()}", flush=True)
        self.check(0)
        end = usage()
        print(f"{self.num_collectives} collectives in {self.number} launches, {time.monotonic() - begin:.0f} s, all "
              f"bytes right with --seed {self.seed}: {end}", flush=True)  # fmt: skip
        if grown := {name: end[name] - warm[name] for name in warm if end[name] - warm[name] > MAX_GROWTH[name]}:
            fail(f"grown with --seed {self.seed}: {grown}, at most {MAX_GROWTH}")


def hold_no_free_memory():
    """Returns freed memory to the system, so that the size of the process shows the memory in use."""
    mmap_threshold, arena_max = -3, -8
    ctypes.CDLL(None).mallopt(mmap_threshold, 64 << 10)
    ctypes.CDLL(None).mallopt(arena_max, 2)


def main():
    hold_no_free_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", type=int, default=3000)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stops", type=float, default=0, help="mean seconds between stops of each process; 0: none")
    args = parser.parse_args()
    # Every launch in flight holds a thread of XLA for each local device, and launches over different meshes pass each
    # other: with as many threads as devices, the default, all may end up with launches that wait for later ones.
    os.environ["PJRT_NPROC"] = str(IN_FLIGHT * 4)
    jax.distributed.initialize()
    stopper = None
    if args.stops:
        me = str(os.getpid()), f"{args.seed} {jax.process_index()}", str(args.stops)
        stopper = subprocess.Popen([sys.executable, "-c", STOPPER, *me], stdin=subprocess.DEVNULL)
    try:
        Soak(args.seed, args.programs).run(args.collectives)
    except BaseException as error:
        fail(f"{type(error).__name__} with --seed {args.seed}: {error}")
    finally:
        if stopper is not None:
            stopper.kill()
            stopper.wait()


if __name__ == "__main__":
    main()
