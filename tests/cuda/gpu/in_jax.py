"""The collectives inside JAX, on all devices of the program: one process with one GPU, or several that share one.

    JAX_PLATFORMS=cuda,cpu python -m pytest tests/cuda/gpu/in_jax.py    # ../on_gpu.py has the rest

In a group of one the handler is called only for an `algorithm=`, so all tests name one.
"""

import ctypes
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from group import MESH, ON_GPU, OPS, RING, SIZE, algorithms, assert_rows, expected, numbers, on_ranks, put
from jax import lax
from report import note

import jaxcomm
from jaxcomm._request import NATIVE

# Processes take turns on the GPU, so each wait for a peer takes milliseconds.
ROUNDS = int(os.environ.get("JAXCOMM_ROUNDS", "3000"))
TYPES = (np.bool_, np.int8, np.uint16, np.int32, ml_dtypes.bfloat16, np.float16, np.float32, np.complex64)
REDUCED = ("psum", "pmean", "pmax", "pmin", "psum_scatter")
each_op = pytest.mark.parametrize("op", OPS)


def chosen(op):
    names = [name for name in algorithms(op) if name is not None]
    return "hierarchical" if "hierarchical" in names else names[0]


def test_info():
    found = jaxcomm.info(communicator=SIZE == 1 and ON_GPU)
    note("info", str(found).splitlines())
    note("ranks", SIZE)
    if ON_GPU:
        assert found.capabilities["kernels"].yes, found.capabilities["kernels"]
        assert found.capabilities["XLA collectives extension"].yes


@each_op
def test_every_algorithm(op):
    """Checks values, and that the handlers were called for them."""
    rows = numbers(1, (8 * SIZE, 6), np.int32 if op != "pmean" else np.float32)
    names = algorithms(op)
    f = on_ranks(lambda x: {str(name): OPS[op][0](jaxcomm, x, algorithm=name) for name in names})
    compiled = f.lower(put(rows)).compile()
    if ON_GPU or SIZE > 1:
        assert compiled.as_text().count(f'custom_call_target="jaxcomm_{NATIVE[op]}"') == len(names)
    want = expected(op, rows)
    # XLA runs a program once before it captures it as a CUDA graph, and then updates and replays that.
    for _ in range(6):
        assert_rows(compiled(put(rows)), dict.fromkeys(map(str, names), want))


@each_op
def test_types(op):
    def fits(dtype):
        ordered = np.dtype(dtype).kind != "c"
        return op not in REDUCED or (np.dtype(dtype) != np.bool_ and (ordered or op in ("psum", "psum_scatter")))

    types = [dtype for dtype in TYPES if fits(dtype) and (op != "pmean" or np.dtype(dtype).kind in "fV")]
    rows = {np.dtype(dtype).name: numbers(3, (8 * SIZE, 12), dtype) for dtype in types}
    names = sorted(rows)
    f = on_ranks(lambda *xs: {k: OPS[op][0](jaxcomm, x, algorithm=chosen(op)) for k, x in zip(names, xs, strict=True)})
    assert_rows(f(*(put(rows[k]) for k in names)), {k: expected(op, rows[k]) for k in names})


@each_op
def test_sizes(op):
    """Empty, prime, not a multiple of 16 bytes, and enough for all multiprocessors that a call may use."""
    # The empty array has its own program: beside another array it crashes the CPU compiler of jaxlib 0.11.2.
    for lengths in [(0,), (1, 127, 65536 + 13)]:
        rows = [numbers(4, (8 * SIZE, k), np.int16 if op != "pmean" else np.float32) for k in lengths]
        f = on_ranks(lambda *xs: [OPS[op][0](jaxcomm, x, algorithm=chosen(op)) for x in xs])
        assert_rows(f(*map(put, rows)), [expected(op, x) for x in rows])


def test_thousands_of_iterations():
    """Counters continue from call to call in one program."""
    rows = numbers(5, (8 * SIZE, 33), np.int32)

    def step(i, x):
        x = jaxcomm.psum(x, "i", algorithm=chosen("psum")) * 3 + x + i
        x = jaxcomm.ppermute(x, "i", RING, algorithm=chosen("ppermute"))
        return jaxcomm.all_to_all(x, "i", 0, 0, tiled=True, algorithm=chosen("all_to_all")) % 4096

    got = on_ranks(lambda x: lax.fori_loop(0, ROUNDS, step, x))(put(rows))
    x = rows
    for i in range(ROUNDS):
        x = np.roll(x.sum(0) * 3 + x + np.int32(i), 1, 0)
        x = x.reshape(SIZE, SIZE, 8, 33).transpose(1, 0, 2, 3).reshape(rows.shape) % 4096
    note("iterations", ROUNDS)
    assert_rows(got, x.astype(np.int32))


def test_many_calls_of_one_program():
    """Changes between runs: XLA moves buffers, and captures or replays graphs."""
    f = on_ranks(lambda x: jaxcomm.psum(x + 1, "i", algorithm=chosen("psum")) % 1000)
    x, rows = put(numbers(6, (257,), np.int32)), numbers(6, (257,), np.int32)
    kept = []
    for i in range(min(ROUNDS, 300)):
        x, rows = f(x), np.stack([(rows + 1).sum(0) % 1000] * SIZE).astype(np.int32)
        if i % 7 == 0:
            kept.append(x)  # otherwise XLA would reuse the same two buffers
    assert_rows(x, rows)


def test_two_programs_take_turns():
    a = on_ranks(lambda x: OPS["all_gather"][0](jaxcomm, x, algorithm=chosen("all_gather")))
    b = on_ranks(lambda x: OPS["psum_scatter"][0](jaxcomm, x, algorithm=chosen("psum_scatter")))
    rows = numbers(7, (8 * SIZE, 100), np.int32)
    results = [(a(put(rows + i)), b(put(rows * i))) for i in range(20)]
    for i, (gathered, scattered) in enumerate(results):
        assert_rows(gathered, expected("all_gather", rows + np.int32(i)))
        assert_rows(scattered, expected("psum_scatter", rows * np.int32(i)))


def test_together_with_collectives_of_xla():
    """Calls in one program: some need the result of the previous one, and some are independent."""
    rows = numbers(8, (8 * SIZE, 40), np.int32)

    def body(x):
        alone = lax.psum(x * 2, "i"), jaxcomm.psum(x * 5, "i", algorithm=chosen("psum"))
        for i in range(6):
            x = lax.psum(x + i, "i") % 50
            x = jaxcomm.all_to_all(x, "i", 0, 0, tiled=True, algorithm=chosen("all_to_all"))
            x = lax.ppermute(x, "i", RING)
            x = jaxcomm.psum(x, "i", algorithm=chosen("psum")) % 70
        return x, *alone

    def by_lax(x):
        alone = lax.psum(x * 2, "i"), lax.psum(x * 5, "i")
        for i in range(6):
            x = lax.psum(x + i, "i") % 50
            x = lax.all_to_all(x, "i", 0, 0, tiled=True)
            x = lax.ppermute(x, "i", RING)
            x = lax.psum(x, "i") % 70
        return x, *alone

    f, reference = on_ranks(body), on_ranks(by_lax)
    for i in range(5):
        want = [[np.asarray(s.data) for s in y.addressable_shards] for y in reference(put(rows + i))]
        got = [[np.asarray(s.data) for s in y.addressable_shards] for y in f(put(rows + i))]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_gradient_of_a_scan():
    def loss(library, x, **named):
        def step(x, scale):
            y = library.psum(jnp.sin(x) * scale, "i", **named.get("psum", {}))
            return library.all_to_all(y * x, "i", 0, 0, tiled=True, **named.get("all_to_all", {})), None

        return jnp.sum(lax.scan(step, x, jnp.arange(1.0, 5.0))[0])

    x = put(np.linspace(-1, 1, SIZE * 8 * SIZE * 3, dtype=np.float32).reshape(SIZE, 8 * SIZE, 3))
    named = {op: {"algorithm": chosen(op)} for op in ("psum", "all_to_all")}
    got = on_ranks(jax.grad(lambda x: loss(jaxcomm, x, **named)))(x)
    want = on_ranks(jax.grad(lambda x: loss(lax, x)))(x)
    for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
        np.testing.assert_allclose(np.asarray(a.data), np.asarray(b.data), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(SIZE == 1, reason="a group of one needs no arena")
def test_arena_grows_under_old_programs():
    """The arena has 32 MiB at first. Programs compiled before it grew keep the old one."""

    def program(x):
        return OPS["all_gather"][0](jaxcomm, x, algorithm=chosen("all_gather"))

    small = numbers(9, (8 * SIZE, 64), np.int32)
    old = on_ranks(program)
    assert_rows(old(put(small)), expected("all_gather", small))
    for megabytes in (24, 40, 90):
        rows = numbers(megabytes, (8, megabytes << 15), np.int32)
        assert_rows(on_ranks(program)(put(rows)), expected("all_gather", rows))
        assert_rows(old(put(small + 1)), expected("all_gather", small + np.int32(1)))


@pytest.mark.parametrize("op", ["psum", "all_gather", "all_to_all", "ppermute"])
def test_started_calls(op):
    """A started call, and a synchronous one beside it."""
    starts = {
        "psum": lambda x: jaxcomm.psum_start(x, "i", algorithm=chosen("psum")),
        "all_gather": lambda x: jaxcomm.all_gather_start(x, "i", tiled=True, algorithm=chosen("all_gather")),
        "all_to_all": lambda x: jaxcomm.all_to_all_start(x, "i", 0, 0, tiled=True, algorithm=chosen("all_to_all")),
        "ppermute": lambda x: jaxcomm.ppermute_start(x, "i", RING, algorithm=chosen("ppermute")),
    }

    def body(x):
        started = starts[op](x)
        beside = jaxcomm.psum(x * 2, "i", algorithm=chosen("psum"))
        return started.done(after=beside), beside

    rows = numbers(15, (8 * SIZE, 700), np.int32)
    results = {
        "psum": lambda: np.stack([rows.sum(0)] * SIZE),
        "all_gather": lambda: np.stack([rows.reshape(-1, 700)] * SIZE),
        "all_to_all": lambda: rows.reshape(SIZE, SIZE, 8, 700).transpose(1, 0, 2, 3).reshape(rows.shape),
        "ppermute": lambda: np.roll(rows, 1, 0),
    }
    want = results[op]().astype(np.int32), np.stack([(2 * rows).sum(0)] * SIZE).astype(np.int32)
    f = on_ranks(body)
    for _ in range(4):
        assert_rows(f(put(rows)), want)


@pytest.mark.parametrize("one_exchange", [False, True])
def test_experts(one_exchange):
    """Each token goes to three experts, whose ranks multiply it by their number plus 1, and comes back as a sum."""
    tokens, choices, experts = 40, 3, 2 * SIZE
    options = {"num_experts": experts, "capacity": choices * tokens * SIZE}
    name = "direct" if ON_GPU or SIZE == 1 else None

    def body(x):
        ids = (jnp.arange(tokens)[:, None] * 5 + jnp.arange(choices) * 3 + lax.axis_index("i")) % experts
        if one_exchange:
            rows, routing = jaxcomm.moe.route_and_dispatch(x, ids, "i", algorithm="one_shot", **options)
        else:
            routing = jaxcomm.moe.route(ids, "i", on_overflow="drop", **options)
            rows = jaxcomm.moe.dispatch(x, routing, algorithm=name)
        rows = rows * (lax.axis_index("i") + 1).astype(x.dtype)
        return jaxcomm.moe.combine(rows, routing, jnp.ones((tokens, choices), x.dtype), algorithm=name)

    x = numbers(16, (tokens, 24), np.float32)
    ids = np.arange(tokens)[:, None] * 5 + np.arange(choices) * 3 + np.arange(SIZE)[:, None, None]
    factors = (ids % experts // 2 + 1).sum(-1, keepdims=True)
    f = on_ranks(body)
    for seed in range(3):
        assert_rows(f(put(x + seed)), ((x + seed) * factors).astype(np.float32))


def test_donated_operand():
    rows = numbers(10, (8 * SIZE, 999), np.int32)
    body = on_ranks(lambda x: jaxcomm.psum(x + 1, "i", algorithm=chosen("psum")))
    f = jax.jit(body, donate_argnums=0)
    assert_rows(f(put(rows)), expected("psum", rows + np.int32(1)))
    assert_rows(f(put(rows)), expected("psum", rows + np.int32(1)))


def test_command_buffers():
    """Checks whether XLA puts custom calls like jaxcomm's into CUDA graphs. A counting custom call shows this."""
    library = ctypes.CDLL(os.environ["JAXCOMM_EMPTY_CALL"])
    library.EmptyCalls.restype = ctypes.c_int64
    for platform in ("CUDA", "cpu"):
        jax.ffi.register_ffi_target("jaxcomm_empty", jax.ffi.pycapsule(library.EmptyCall), platform=platform)

    def body(x):
        x = jaxcomm.psum(x, "i", algorithm=chosen("psum")) % 500
        x = jax.ffi.ffi_call("jaxcomm_empty", jax.typeof(x), has_side_effect=True, input_output_aliases={0: 0})(x)
        return jaxcomm.psum(x + 1, "i", algorithm=chosen("psum")) % 500

    f, rows = on_ranks(body), numbers(11, (64,), np.int32)
    x, runs = put(rows), 30
    for _ in range(runs):
        x = f(x)
        rows = np.stack([((rows.sum(0) % 500 + 1) * SIZE) % 500] * SIZE).astype(np.int32)
    assert_rows(x, rows)
    calls = library.EmptyCalls() / len(MESH.local_devices)
    note("calls of a handler in 30 runs", calls)
    if os.environ["JAXCOMM_COMMAND_BUFFERS"] == "off" or not ON_GPU:
        assert calls == runs
    elif os.environ["JAXCOMM_COMMAND_BUFFERS"] == "on":
        assert calls < runs, "XLA has made no CUDA graph"
