"""ragged_all_to_all: values, derivatives, batches and errors, with offsets and sizes known at run time only."""

import re

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged
import reference
from harness import OURS, assert_same, on_ranks, run, value
from jax import lax
from jax.sharding import PartitionSpec as P

FULL = ((), pytest.mark.full)
GROUPS = [[5, 0, 3, 6], [1, 7, 2, 4]]


def expected(operands, outputs, vectors, add=False):
    return np.stack(reference.ragged_all_to_all(operands, outputs, *vectors[:3], add=add))


def composition(operands, outputs, vectors):
    """The op on one device, as indexing of jax.numpy; operands and outputs have a row per rank."""
    n, rows = len(operands), operands.shape[1]
    numbers = np.arange(n * rows).reshape(n, rows)  # of all rows of all operands
    source = np.stack(reference.ragged_all_to_all(numbers, np.full((n, outputs.shape[1]), -1), *vectors[:3]))
    sent = operands.reshape(n * rows, *operands.shape[2:])[source]
    return jnp.where((source >= 0).reshape(*source.shape, *[1] * (operands.ndim - 2)), sent, outputs)


@collective.VMA
@pytest.mark.parametrize("algorithm", [None, *OURS.algorithms("ragged_all_to_all")])
@pytest.mark.parametrize("per_pair", [1, 3])
def test_random_slices(line, rng, algorithm, per_pair, check_vma):
    """Several programs' worth of offsets and sizes in one compiled program."""
    program = None
    for _ in range(4):
        vectors, rows, to_rows = ragged.slices(rng, 8, per_pair)
        x = rng.integers(-99, 99, (8, rows, 5)).astype(np.int16)
        start = rng.integers(-99, 99, (8, to_rows, 5)).astype(np.int16)
        program = program or jax.jit(
            on_ranks(lambda x, y, *v: ragged.call(x, y, v, "gpu", algorithm=algorithm), line, check_vma=check_vma)
        )
        assert_same(value(program(x, start, *vectors)), expected(x, start, vectors))


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=FULL[d != "float32"]) for d in collective.ALL_DTYPES])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,), (513,)], ids=str)
def test_element_types_and_shapes_of_rows(mesh, rng, dtype, shape):
    vectors, rows, to_rows = ragged.slices(rng, 8, 2)
    x, start = (collective.any_bits(rng, (8, r, *shape), dtype) for r in (rows, to_rows))
    with jax.enable_x64(True):
        got = run(lambda x, y, *v: ragged.call(x, y, v, ("node", "gpu")), mesh, x, start, *vectors)
    assert_same(got, expected(x, start, vectors), bits=True)


def test_axes_and_groups(mesh, rng):
    """One axis of two, both in the other order, and groups whose ranks are not in order."""
    four, rows, to_rows = ragged.slices(rng, 4, 2)
    eight = ragged.slices(rng, 8, 1, largest=1, gap=0)[0]
    x, start = (rng.integers(-99, 99, (8, r, 2)).astype(np.int32) for r in (rows, to_rows))

    def body(x, y):
        inner, node = lax.axis_index("gpu"), lax.axis_index("node")
        position = jnp.array(np.argsort(np.ravel(GROUPS)) % 4)[2 * inner + node]
        return {
            "inner": ragged.call(x, y, [v[inner] for v in map(jnp.array, four)], "gpu"),
            "order": ragged.call(x, y, [v[2 * inner + node] for v in map(jnp.array, eight)], ("gpu", "node")),
            "groups": ragged.call(
                x, y, [v[position] for v in map(jnp.array, four)], ("gpu", "node"), axis_index_groups=GROUPS
            ),
        }

    got = run(body, mesh, x, start)
    order = [4 * (i % 2) + i // 2 for i in range(8)]  # rank along ("gpu", "node") -> row
    ways = {
        "inner": ([range(4), range(4, 8)], four),
        "order": ([order], eight),
        "groups": ([[order[i] for i in group] for group in GROUPS], four),
    }
    for name, (groups, vectors) in ways.items():
        want = start.copy()
        for group in map(list, groups):
            want[group] = expected(x[group], start[group], vectors)
        assert_same({name: got[name]}, {name: want})


def test_group_of_one(mesh, rng):
    """Slices move inside of one rank."""
    x, start = np.arange(8 * 4).reshape(8, 4), np.zeros((8, 4), np.int64)
    vectors = [np.tile(np.array(v, np.int32), (8, 1)) for v in ([0, 3], [2, 1], [1, 0], [2, 1])]
    alone = [[i] for i in range(4)]
    got = run(lambda x, y, *v: ragged.call(x, y, v, "gpu", axis_index_groups=alone), mesh, x, start, *vectors)
    want = np.stack([x[:, 3], x[:, 0], x[:, 1], 0 * x[:, 0]], 1)
    assert_same(got, want.astype(got.dtype))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_types_of_the_vectors(line, rng, dtype):
    vectors, rows, to_rows = ragged.slices(rng, 8, 1)
    x, start = rng.integers(0, 99, (8, rows)).astype(np.int32), np.zeros((8, to_rows), np.int32)
    with jax.enable_x64(dtype == "int64"):
        got = run(
            lambda x, y, a, *v: ragged.call(x, y, [a, *(w.astype(dtype) for w in v)], "gpu"), line, x, start, *vectors
        )
    assert_same(got, expected(x, start, vectors))


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlap"])
@pytest.mark.parametrize("axes", [("gpu",), ("node", "gpu")], ids=str)
def test_derivatives_are_those_of_indexing(mesh, rng, axes, overlap):
    """Empty slices, and rows of the operand that go to several ranks, on integers."""
    n = 4 if axes == ("gpu",) else 8
    vectors, rows, to_rows = ragged.slices(rng, n, 2, overlap=overlap)
    every = [np.tile(v, (8 // n, 1)) for v in vectors]
    x, start, dx, dy, ct = (
        rng.integers(-9, 9, (8, r, 3)).astype(np.float32) for r in (rows, to_rows, rows, to_rows, to_rows)
    )

    def body(x, y, dx, dy, ct, *v):
        f = lambda x, y: ragged.call(x, y, v, axes)  # noqa: E731
        gradients = jax.vjp(f, x, y)[1](ct)
        # The transpose of the transpose is the op.
        back = lambda ct: jax.vjp(f, x, y)[1](ct)  # noqa: E731
        twice = jax.vjp(back, ct)[1]((dx, dy))[0]
        return jax.jvp(f, (x, y), (dx, dy)), gradients, twice, jax.vjp(lambda x: f(x, y), x)[1](ct)

    (result, tangent), gradients, twice, operand_alone = run(body, mesh, x, start, dx, dy, ct, *every)
    for first in range(0, 8, n):
        at = slice(first, first + n)
        f = lambda x, y: composition(x, y, vectors)  # noqa: E731
        want, tangent_wanted = jax.jvp(f, (jnp.array(x[at]), jnp.array(start[at])), (dx[at], dy[at]))
        wanted = jax.vjp(f, jnp.array(x[at]), jnp.array(start[at]))[1](jnp.array(ct[at]))
        assert_same([result[at], tangent[at], twice[at]], [want, tangent_wanted, tangent_wanted])
        assert_same([g[at] for g in gradients], list(wanted))
        assert_same(operand_alone[0][at], wanted[0])


def test_one_row_sent_to_all_ranks(line):
    """The case of a replicated batch: its cotangents are added, in the order of ranks."""
    one = np.ones((8, 8), np.int32)
    vectors = (0 * one, one, np.arange(8, dtype=np.int32)[:, None] * one, one)
    ct = np.array([[2.0**24, *[1.0] * 7]] * 8, np.float32).T.copy()  # 2^24 + 1 rounds down, each time

    def body(ct, *v):
        x = 0 * ct[:1]
        return jax.vjp(lambda x: ragged.call(x, jnp.zeros(8), v, "gpu"), x)[1](ct)[0]

    got = run(body, line, ct, *vectors)
    assert_same(got, np.add.accumulate(ct, 0, np.float32)[-1][:, None])


def test_overlap_behind_an_empty_slice(line):
    """The cotangents of a row that two slices send are added, with an empty slice in between."""
    none = np.zeros((8, 8), np.int32)
    inputs, sizes, outputs = none.copy(), none.copy(), none.copy()
    inputs[0, :3], sizes[0, :3] = (0, 1, 2), (3, 0, 2)
    received = sizes.T.copy()

    def body(ct, *v):
        return jax.vjp(lambda x: ragged.call(x, 0 * ct, v, "gpu"), 0 * ct)[1](ct)[0]

    ct = np.arange(32, dtype=np.float32).reshape(8, 4) + 1
    got = run(body, line, ct, inputs, sizes, outputs, received)
    want = 0 * ct
    want[0] = [ct[0, 0], ct[0, 1], ct[0, 2] + ct[2, 0], ct[2, 1]]
    assert_same(got, want)


@pytest.mark.parametrize("batched", ["rows", "output", "all"])
def test_vmap(line, rng, batched):
    """The batch dimension is anywhere; offsets and sizes may differ in each element."""
    several = [ragged.slices(rng, 8, 2) for _ in range(3)]
    rows, to_rows = several[0][1:]
    x, start = (rng.integers(-99, 99, (8, r, 3, 2)).astype(np.float32) for r in (rows, to_rows))
    vectors = [np.stack([v[0][i] for v in several], 2) for i in range(4)]  # (rank, slice, element)
    axes = {"rows": (1, 1, *[None] * 4), "output": (None, 1, *[None] * 4), "all": (1, 1, *[1] * 4)}[batched]

    def body(x, y, *v):
        x = x if axes[0] == 1 else x[:, 0]
        v = v if axes[2] == 1 else [w[:, 0] for w in v]
        f = lambda x, y, *v: ragged.call(x, y, v, "gpu")  # noqa: E731
        return jax.vmap(f, axes, 1)(x, y, *v), jax.vmap(jax.grad(lambda *a: jnp.sum(f(*a) ** 2)), axes, 1)(x, y, *v)

    got, gradient = run(body, line, x, start, *vectors)
    for i, (own, *_) in enumerate(several):
        own = own if batched == "all" else several[0][0]
        operand = x[:, :, i if axes[0] == 1 else 0]
        want = expected(operand, start[:, :, i], own)
        assert_same(got[:, :, i], want)
        sent = jax.grad(lambda o, i=i, own=own: jnp.sum(composition(o, jnp.array(start[:, :, i]), own) ** 2))
        assert_same(gradient[:, :, i], sent(jnp.array(operand)))


def test_vmap_over_its_axis_is_refused(line, rng):
    x, v = np.zeros((8, 2, 3), np.float32), np.zeros((8, 2, 2), np.int32)
    with pytest.raises(NotImplementedError, match="ragged_all_to_all: 'i' is an axis of vmap"):
        run(jax.vmap(lambda x, v: ragged.call(x, x, [v] * 4, "i"), axis_name="i"), line, x, v)


def test_under_transformations(line, rng):
    """scan, cond, checkpoint, donation and nested jit, each with its own sizes in every iteration."""
    several = [ragged.slices(rng, 8, 1, largest=2, gap=0) for _ in range(3)]
    rows = several[0][2]
    x = rng.integers(-9, 9, (8, rows)).astype(np.float32)
    vectors = [np.stack([v[0][i] for v in several], 1) for i in range(4)]

    def body(x, *v):
        @jax.checkpoint
        def step(x, v):
            moved = jax.jit(lambda x, v: ragged.call(x, x, v, "gpu"))(x, v)
            return lax.cond(v[1].sum() >= 0, lambda y: 2 * y, lambda y: y, moved), None

        return jax.value_and_grad(lambda x: jnp.sum(lax.scan(step, x, v)[0]))(x)

    def alone(x):
        for own, *_ in several:
            x = 2 * composition(x, x, own)
        return jnp.sum(x, axis=1)

    got, gradient = run(body, line, x, *vectors)
    assert_same(got, alone(jnp.array(x)))
    assert_same(gradient, jax.grad(lambda x: alone(x).sum())(jnp.array(x)))
    own = several[0][0]
    placed = jax.device_put(x, jax.sharding.NamedSharding(line, P("gpu")))
    donated = jax.jit(on_ranks(lambda y, x, *v: ragged.call(x, y, v, "gpu"), line), donate_argnums=0)
    assert_same(value(donated(placed, -x, *own)), expected(-x, x, own))


def test_results_vary(line):
    """jax.lax types them like `output`, so that zeros would give a result that counts as equal on all ranks."""
    v = jnp.zeros(8, jnp.int32)
    f = jax.shard_map(
        lambda x: ragged.call(x, jnp.zeros((3, 1)), [v] * 4, "gpu"), mesh=line, in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(f, jnp.zeros((2, 1)))
    types = []
    f = jax.shard_map(
        lambda x: types.append(jax.typeof(ragged.call(x, jnp.zeros((3, 1)), [v] * 4, "gpu"))) or x,
        mesh=line, in_specs=P(), out_specs=P(),
    )  # fmt: skip
    jax.eval_shape(f, jnp.zeros((2, 1)))
    assert types[0].manual_axis_type.varying == {"gpu"} and types[0].shape == (3, 1) and not types[0].weak_type


# Changes of one rank's vectors, and the message on all ranks. Ranks send one row of three to each other.
WRONG = {
    "sizes that disagree": (
        {"send_sizes": (2, 5, 2)},
        "slice 0 from rank 2 to rank 5: send_sizes is 2 at rank 2 and recv_sizes is 1 at rank 5, expected equal sizes",
    ),
    "negative size": (
        {"send_sizes": (2, 5, -1), "recv_sizes": (5, 2, -1)},
        "slice 0 from rank 2 to rank 5: send_sizes is -1 at rank 2 and recv_sizes is -1 at rank 5, expected at least 0",
    ),
    "operand exceeded": (
        {"input_offsets": (2, 5, 3)},
        "slice 0 from rank 2 to rank 5: it starts at row 3 of the operand (input_offsets of rank 2), but the "
        "operand has 3 rows; send_sizes is 1 at rank 2 and recv_sizes is 1 at rank 5",
    ),
    "negative offset": (
        {"input_offsets": (2, 5, -1)},
        "it starts at row -1 of the operand (input_offsets of rank 2), but the operand has 3 rows",
    ),
    "output exceeded": (
        {"output_offsets": (2, 5, 9)},
        "slice 0 from rank 2 to rank 5: it goes to row 9 of the output (output_offsets of rank 2), but the output "
        "has 9 rows; send_sizes is 1 at rank 2 and recv_sizes is 1 at rank 5",
    ),
    "size beyond any buffer": (
        {"send_sizes": (2, 5, 2**31 - 1), "recv_sizes": (5, 2, 2**31 - 1)},
        "but the operand has 3 rows; send_sizes is 2147483647 at rank 2",
    ),
    "overlap": (
        {"output_offsets": (2, 5, 6)},
        "rank 2 writes rows [6, 7) and rank 6 writes rows [6, 7) of the output of rank 5: slices must not overlap",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_on_all_ranks_show_both_sides(line, case):
    changes, message = WRONG[case]
    one = np.ones((8, 8), np.int32)
    vectors = {
        "input_offsets": 0 * one,
        "send_sizes": one.copy(),
        "output_offsets": np.arange(8, dtype=np.int32)[:, None] * one,
        "recv_sizes": one.copy(),
    }
    x, start = np.arange(24, dtype=np.float32).reshape(8, 3), np.zeros((8, 9), np.float32)
    good = [v.copy() for v in vectors.values()]
    for name, (rank, peer, changed) in changes.items():
        vectors[name][rank, peer] = changed
    program = jax.jit(on_ranks(lambda x, y, *v: ragged.call(x, y, v, "gpu"), line))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)) as caught:
        jax.block_until_ready(program(x, start, *vectors.values()))
    assert "jaxcomm: ragged_all_to_all at ragged.py" in str(caught.value)
    assert_same(value(program(x, start, *good)), expected(x, start, good))


def test_offsets_of_empty_slices_are_ignored(line):
    x, start = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
    far, none = np.full((8, 8), 2**31 - 1, np.int32), np.zeros((8, 8), np.int32)
    got, gradient = run(
        lambda x, y, *v: jax.value_and_grad(lambda y: jnp.sum(ragged.call(x, y, v, "gpu")))(y),
        line, x, start + 1, far, none, far, none,
    )  # fmt: skip
    assert_same([got, gradient], [start[:, 0] + 2, start + 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": jnp.zeros((4, 2))}, "operand and output must have rows of one shape, got shapes .3,. and .4, 2."),
        ({"operand": jnp.zeros(())}, "operand and output must have rows of one shape"),
        ({"output": jnp.zeros(4, jnp.int32)}, "must have one element type, got float32 and int32"),
        ({"send_sizes": jnp.zeros(8)}, "send_sizes must have integers, got element type float32"),
        (
            {"recv_sizes": jnp.zeros((1, 8), int)},
            "recv_sizes must have one dimension and at least one slice, got shape",
        ),
        ({"input_offsets": jnp.zeros(0, int)}, "input_offsets must have one dimension and at least one slice"),
        ({"output_offsets": jnp.zeros(16, int)}, "output_offsets has 16 slices, but input_offsets has 8"),
        (
            dict.fromkeys(ragged.VECTORS, jnp.zeros(9, int)),
            "the 9 slices of input_offsets cannot be divided among the 8",
        ),
        ({"algorithm": "ring"}, "unknown algorithm 'ring'; pass one of direct, pairwise, xla"),
        ({"axis_index_groups": [[0, 1]]}, "axis_index_groups must have each index"),
    ],
    ids=str,
)
def test_wrong_arguments(line, arguments, message):
    given = {"operand": jnp.zeros(3), "output": jnp.zeros(4), **dict.fromkeys(ragged.VECTORS, jnp.zeros(8, int))}
    with pytest.raises(ValueError, match=f"ragged_all_to_all: .*{message}"):
        run(lambda _: OURS.ragged_all_to_all(**{**given, **arguments}, axis_name="gpu"), line, np.zeros((8, 1)))


def lowered(line, platform, algorithm):
    v = jax.ShapeDtypeStruct((8, 8), "int32")
    x, y = jax.ShapeDtypeStruct((8, 3), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
    f = jax.jit(on_ranks(lambda x, y, *v: ragged.call(x, y, v, "gpu", algorithm=algorithm), line))
    return f.trace(x, y, v, v, v, v).lower(lowering_platforms=(platform,)).as_text()


def test_platforms(line):
    """XLA has no such collective on CPUs, and jaxcomm has none on platforms other than CPUs and CUDA."""
    assert lowered(line, "cpu", None).count("@jaxcomm_all_to_all_v(") == 1
    for platform in ("cuda", "tpu"):
        text = lowered(line, platform, "xla")
        assert "@ragged_all_to_all(" in text and "jaxcomm_all_to_all_v" not in text
    with pytest.raises(NotImplementedError, match="XLA has no ragged_all_to_all on CPUs"):
        lowered(line, "cpu", "xla")
    with pytest.raises(
        NotImplementedError,
        match="GPUs have algorithm 'direct' for groups inside a node, and otherwise 'xla'; got 'pairwise'",
    ):
        lowered(line, "cuda", "pairwise")
