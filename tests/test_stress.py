"""Many calls at once: independent ones, loops, several programs in flight, mixed with XLA's own collectives.

Guards against deadlocks (which thread completes which promise) and against calls matched with the wrong call. `--size`
sets the number of iterations. Each iteration has a deadline (conftest.py): a test that hangs ends with its name and all
stacks.
"""

import concurrent.futures
import functools
import random
import types

import jax
import numpy as np
import pytest
import reference
from harness import LAX, OURS, assert_same, on_ranks
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROUNDS = {"default": 1, "full": 3, "stress": 20}
BOTH = ("node", "gpu")
SIZES = {"node": 2, "gpu": 4}
IN_FLIGHT = 30  # beyond 32 launches XLA:CPU 0.10 runs out of threads, with its own collectives too
AXES = ("node", "gpu", BOTH)
pytestmark = pytest.mark.deadline(100)  # ten times what a quiet machine takes


def oracle(op):
    """An op on the stacked rows of all ranks, in NumPy: XLA takes long to compile a hundred of its own collectives."""

    def call(x, axes, *args, **kwargs):
        rows = x.reshape(2, 4, *x.shape[1:])
        y = reference.on_mesh(lambda blocks: getattr(reference, op)(blocks, *args, **kwargs), rows, SIZES, axes)
        return y.reshape(8, *y.shape[2:])

    return call


NUMPY = types.SimpleNamespace(**{op: oracle(op) for op in vars(LAX)})


def repeat(steps, body, x):
    if isinstance(x, np.ndarray):
        for i in range(steps):
            x = body(np.int32(i), x)
        return x
    return lax.fori_loop(0, steps, body, x)


def exchange(library, x):
    return library.all_to_all(x, BOTH, 0, 0, tiled=True)


# Functions of the library for our calls, the library for XLA's, and the operand.


def independent(ours, xla, x):
    """200 calls that depend only on the operand, so that devices reach them in any order."""
    return [exchange(ours, x + i) for i in range(200)]


def independent_groups(ours, xla, x):
    """Other ops and groups over different axes at once."""
    ops = [
        *(ours.psum, ours.pmax, ours.all_gather, ours.barrier),
        functools.partial(ours.psum_scatter, tiled=True),
        lambda y, axes: ours.ppermute(y, axes, [(0, 1), (1, 0)]),
        lambda y, axes: ours.pbroadcast(y, axes, 1),
    ]
    return [op(x + i, axes) for i in range(5) for op in ops for axes in AXES]


def crossed(ours, xla, x):
    """Two chains that swap in each step: one uses jaxcomm's collectives, the other XLA's."""
    y = x + 1
    for i in range(50):
        x, y = exchange(ours, x), exchange(xla, y)
        if i % 8 == 7:
            x, y = x + y, x - y
    return x, y


def loop(ours, xla, x):
    return repeat(50, lambda i, x: exchange(xla, exchange(ours, x) + i), x)


def nested_loops(ours, xla, x):
    """One call site, many iterations under one run; groups of different nodes proceed at different speed."""

    def inner(i, x):
        return ours.all_to_all(x, "gpu", 0, 0, tiled=True) * 3 + i

    return repeat(20, lambda i, x: exchange(ours, repeat(5, inner, x)) + i, x)


def chain(ours, xla, x):
    """Only jaxcomm's calls, too few for XLA's concurrent executor."""
    return exchange(ours, exchange(ours, exchange(ours, x)))


PROGRAMS = [independent, independent_groups, crossed, loop, nested_loops, chain]


@pytest.fixture
def rounds(request):
    return ROUNDS[request.config.getoption("--size")]


def data(rng, count=1024):
    return rng.integers(0, 1 << 20, (8, count)).astype(np.int32)  # integers wrap, so every order gives the same


@pytest.fixture(scope="module")
def compiled(mesh):
    """Program -> compiled once: several tests run the same ones."""
    return {p: jax.jit(on_ranks(lambda x, p=p: p(OURS, LAX, x), mesh)) for p in PROGRAMS}


def wanted(program, x):
    return program(NUMPY, NUMPY, x)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_calls_never_deadlock_and_never_mix(program, compiled, rng, alive, rounds):
    x = data(rng)
    want = wanted(program, x)
    for _ in range(10 * rounds):
        alive()
        assert_same(compiled[program](x), want)


def test_programs_in_flight(compiled, mesh, rng, alive, rounds):
    """Dispatch is asynchronous: thirty launches, ours between XLA's, before the first result is looked at."""
    x = data(rng)
    programs = [crossed, loop, nested_loops, chain, independent_groups]
    wants = [wanted(p, x) for p in programs]
    xla = jax.jit(on_ranks(lambda x: loop(LAX, LAX, x), mesh))
    jax.block_until_ready([xla(x), *(compiled[p](x) for p in programs)])
    for _ in range(rounds):
        alive()
        results = [([compiled[p](x) for p in programs], xla(x)) for _ in range(IN_FLIGHT // 6)]
        for ours, theirs in results:
            assert_same(ours, wants)
            assert_same(theirs, wants[1])


def test_python_threads(compiled, rng, alive, rounds):
    """Four threads launch three programs in different orders."""
    xs = [data(rng) for _ in range(4)]
    programs = [crossed, loop, chain]
    wants = [[wanted(p, x) for p in programs] for x in xs]
    jax.block_until_ready([compiled[p](xs[0]) for p in programs])

    def work(number):
        for round_ in range(4 * rounds):
            alive()
            for i in random.Random(f"{number} {round_}").sample(range(3), 3):
                assert_same(compiled[programs[i]](xs[number]), wants[number][i])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_donated_buffers_in_flight(mesh, rng, alive, rounds):
    """Each launch overwrites the operand of the one before, while that one may still run."""
    x = data(rng, 8 * 4099)
    f = jax.jit(on_ranks(lambda x: chain(OURS, LAX, x) + 1, mesh), donate_argnums=0)
    for _ in range(2 * rounds):
        alive()
        y = jax.device_put(x, NamedSharding(mesh, P(BOTH)))
        for _ in range(IN_FLIGHT):
            y = f(y)
        assert_same(y, x + IN_FLIGHT)  # an exchange is its own inverse, and their number is even


def test_sums_have_the_same_bits_in_every_run(mesh, rng, alive, rounds):
    """The threads of a call differ between executions; the order of additions must not."""
    x = rng.standard_normal((8, 300_000)).astype(np.float32)  # large enough for worker threads
    f = jax.jit(on_ranks(lambda x: (OURS.psum(x, BOTH), OURS.psum(x, BOTH, algorithm="direct")), mesh, check_vma=False))
    first = jax.tree.map(np.asarray, f(x))
    for result in first:
        for row in result:
            assert_same(row, result[0], bits=True)
    for _ in range(4 * rounds):
        alive()
        assert_same(f(x), first, bits=True)
