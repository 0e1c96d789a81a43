"""ragged_all_to_all: values, derivatives, batches and errors, with offsets and sizes known at run time only."""

import re

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pairwise
import pytest
import ragged
import reference
from harness import OURS, assert_same, on_ranks, run, value
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FULL = ((), pytest.mark.full)


def expected(operands, outputs, vectors):
    return np.stack(reference.ragged_all_to_all(operands, outputs, *vectors[:3]))


OPTIONS = {
    "axes": [("gpu",), ("node", "gpu"), ("gpu", "node")],
    "groups": ["one", "two", "single"],
    "mesh": ["vma", "no_vma", "explicit"],
    "algorithm": [None, *OURS.algorithms("ragged_all_to_all")],
    "dtype": ["float32", "bfloat16", "float64", "complex64", "int8"],
    "vectors": ["int32", "int8", "uint32", "int64"],
    "per_pair": [1, 3],
    "slices": ["apart", "overlap"],
    "batch": ["alone", "nothing", "rows", "operand", "output", "all", "cotangents"],
    "within": list(pairwise.WITHIN),
    "width": [2, 0],
    "donated": [False, True],
}
B = 2


def allowed(case):
    return not (
        (case["vectors"] == "int64" and case["dtype"] != "float64")
        or (case["mesh"] == "explicit" and not case["width"])  # XLA loses the sharding of empty arrays
    )


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames and "number" in metafunc.fixturenames:
        pairwise.parametrize(metafunc, [OPTIONS], allowed)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_options(rng, case, number):
    """Every two options together. The rows of all results come from rows of all operands: of numbers[source]."""
    dtype, batch, factors = case["dtype"], case["batch"], np.array(pairwise.WITHIN[case["within"]])
    kind = AxisType.Explicit if case["mesh"] == "explicit" else AxisType.Auto
    mesh, ids = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(kind,) * 2), np.arange(8).reshape(2, 4)
    groups = {("gpu",): ids, ("node", "gpu"): ids.reshape(1, 8), ("gpu", "node"): ids.T.reshape(1, 8)}[case["axes"]]
    n, more = groups.shape[1], {"algorithm": case["algorithm"]}
    if case["groups"] != "one":
        order = np.array(collective.ORDERS[n])
        n = n // 2 if case["groups"] == "two" else 1
        more["axis_index_groups"] = order.reshape(-1, n).tolist()
        groups = groups[:, order].reshape(-1, n)
    # Elements of the batch that each operand has.
    of_x = B if batch in ("rows", "operand", "all") else 1
    of_y = B if batch in ("rows", "output", "all") else 1
    of_v, size = B if batch == "all" else 1, max(of_x, of_y)
    several = [ragged.slices(rng, n, case["per_pair"], overlap=case["slices"] == "overlap") for _ in range(of_v)]
    _, rows, to_rows = several[0]
    numbers = np.arange(8 * rows).reshape(8, rows)
    vectors = np.zeros((4, 8, of_v, n * case["per_pair"]), case["vectors"])
    source = np.full((of_v, 8, to_rows), -1)
    for e, (own, *_) in enumerate(several):
        for group in groups:
            vectors[:, group, e] = own
            source[e, group] = expected(numbers[group], source[e, group], own)

    def batched(x, y, v):
        call = lambda x, y, *v: ragged.call(x, y, v, case["axes"], **more)  # noqa: E731
        if size == 1:
            one = lambda _: call(x[0], y[0], *(w[0] for w in v))  # noqa: E731
            return jax.vmap(one)(jnp.arange(1)) if batch == "nothing" else one(0)[None]
        x, at_x = (x[0], None) if of_x == 1 else (jnp.moveaxis(x, 0, 1), 1)
        y, at_y = (y[0], None) if of_y == 1 else (y, 0)
        v, at_v = ([w[0] for w in v], None) if of_v == 1 else (v, 0)
        return jax.vmap(call, (at_x, at_y, *[at_v] * 4))(x, y, *v)

    def body(x, y, dx, dy, cts, v):
        f = lambda x, y: pairwise.within(case["within"], lambda x: batched(x, y, v), x, mesh.axis_names)  # noqa: E731
        if dtype == "int8":
            return f(x, y)
        pull = jax.vjp(f, x, y)[1]
        found = jax.vmap(pull)(cts) if batch == "cotangents" else [g[None] for g in pull(cts[0])]
        return *jax.jvp(f, (x, y), (dx, dy)), *found

    (x, x64), (dx, dx64) = (pairwise.elements(rng, (8, of_x, rows, case["width"]), dtype) for _ in range(2))
    (y, y64), (dy, dy64) = (pairwise.elements(rng, (8, of_y, to_rows, case["width"]), dtype) for _ in range(2))
    cts, cts64 = pairwise.elements(rng, (8, 2, len(factors), size, to_rows, case["width"]), dtype)
    with pairwise.environment(mesh, dtype):
        operands = jax.device_put((x, y, dx, dy, cts, list(vectors)), NamedSharding(mesh, P(mesh.axis_names)))
        f = on_ranks(body, mesh, check_vma=case["mesh"] != "no_vma")
        got = value(jax.jit(f, donate_argnums=(0, 1) if case["donated"] else ())(*operands))

    def moved(x, y):
        """(8, results of within, batch, ...)."""
        want = np.zeros((8, len(factors), size, to_rows, case["width"]), x.dtype)
        for w, b in np.ndindex(len(factors), size):
            at, flat = source[b % of_v], x[:, b % of_x].reshape(8 * rows, case["width"])
            want[:, w, b] = np.where(at[..., None] >= 0, factors[w] * flat[at], y[:, b % of_y])
        return want

    def pulled(ct):
        gx, gy = np.zeros((of_x, 8 * rows, case["width"]), ct.dtype), np.zeros(y.shape, ct.dtype)
        for w, b in np.ndindex(len(factors), size):
            at = source[b % of_v]
            np.add.at(gx[b % of_x], at[at >= 0], factors[w] * ct[:, w, b][at >= 0])
            gy[:, b % of_y] += ct[:, w, b] * (at < 0)[..., None]
        return gx.reshape(of_x, 8, rows, -1).swapaxes(0, 1), gy

    if dtype == "int8":
        pairwise.assert_close(got, moved(x64, y64), 0, "value")
        return
    pairwise.assert_close(got[0], moved(x64, y64), 0, "value")
    pairwise.assert_close(got[1], moved(dx64, dy64), 0, "jvp")
    for i in range(2 if batch == "cotangents" else 1):
        for g, want, bound in zip(got[2:], pulled(cts64[:, i]), pulled(np.abs(cts64[:, i])), strict=True):
            pairwise.assert_close(g[:, i], want, 4 * float(jnp.finfo(dtype).eps) * bound, "vjp")


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=FULL[d != "float32"]) for d in collective.ALL_DTYPES])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,), (513,)], ids=str)
def test_element_types_and_shapes_of_rows(mesh, rng, dtype, shape):
    vectors, rows, to_rows = ragged.slices(rng, 8, 2)
    x, start = (collective.any_bits(rng, (8, r, *shape), dtype) for r in (rows, to_rows))
    with jax.enable_x64(True):
        got = run(lambda x, y, *v: ragged.call(x, y, v, ("node", "gpu")), mesh, x, start, *vectors)
    assert_same(got, expected(x, start, vectors), bits=True)


@pytest.mark.parametrize(("dtype", "first"), [("float32", 2.0**24), ("bfloat16", 256.0)])
def test_one_row_sent_to_all_ranks(line, dtype, first):
    """The case of a replicated batch: its cotangents are added in float32, in the order of ranks, and rounded once.

    2^24 + 1 rounds down in float32, each time. 256 + 7 * 1 is 264 in bfloat16; rounded after each sum, it stays 256.
    """
    one = np.ones((8, 8), np.int32)
    vectors = (0 * one, one, np.arange(8, dtype=np.int32)[:, None] * one, one)
    ct = np.array([[first, *[1.0] * 7]] * 8, np.float32).T.astype(dtype)

    def body(ct, *v):
        x = 0 * ct[:1]
        return jax.vjp(lambda x: ragged.call(x, jnp.zeros(8, dtype), v, "gpu"), x)[1](ct)[0]

    got = run(body, line, ct, *vectors)
    assert_same(got, np.add.accumulate(ct.astype(np.float32), 0)[-1][:, None].astype(dtype))


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


def test_vmap_over_its_axis_is_refused(line, rng):
    x, v = np.zeros((8, 2, 3), np.float32), np.zeros((8, 2, 2), np.int32)
    with pytest.raises(NotImplementedError, match="ragged_all_to_all: 'i' is an axis of vmap"):
        run(jax.vmap(lambda x, v: ragged.call(x, x, [v] * 4, "i"), axis_name="i"), line, x, v)


def test_results_vary(line):
    """jax.lax types them like `output`, so that zeros would give a result that counts as equal on all ranks."""
    v = jnp.zeros(8, jnp.int32)
    types = []
    f = jax.shard_map(
        lambda x: types.append(jax.typeof(ragged.call(x, jnp.zeros((3, 1)), [v] * 4, "gpu"))) or x,
        mesh=line, in_specs=P(), out_specs=P(),
    )  # fmt: skip
    jax.eval_shape(f, jnp.zeros((2, 1)))
    assert types[0].manual_axis_type.varying == {"gpu"} and types[0].shape == (3, 1) and not types[0].weak_type


# Changes of one rank's vectors, and a part of the message on all ranks. Ranks send one row of three to each other.
WRONG = {
    "sizes that disagree": ({"send_sizes": (2, 5, 2)}, "slice 0 from rank 2 to rank 5: send_sizes is 2 at rank 2 and"),
    "operand exceeded": (
        {"input_offsets": (2, 5, 3)},
        "row 3 of the operand (input_offsets of rank 2), but the ",
    ),
    "output exceeded": (
        {"output_offsets": (2, 5, 9)},
        "row 9 of the output (output_offsets of rank 2), but the ",
    ),
    "overlap": ({"output_offsets": (2, 5, 6)}, "rank 2 writes rows [6, 7) and rank 6 writes rows [6, 7) of the output"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": jnp.zeros((4, 2))}, "operand and output must have rows of one shape, got shapes .3,. and .4, 2."),
        ({"operand": jnp.zeros(())}, "operand and output must have rows of one shape"),
        ({"output": jnp.zeros(4, jnp.int32)}, "must have one element type, got float32 and int32"),
        ({"send_sizes": jnp.zeros(8)}, "send_sizes must have integers, got element type float32"),
        ({"recv_sizes": jnp.zeros((1, 8), int)}, "recv_sizes must have one dimension and at least one slice"),
        ({"input_offsets": jnp.zeros(0, int)}, "input_offsets must have one dimension and at least one slice"),
        ({"output_offsets": jnp.zeros(16, int)}, "output_offsets has 16 slices, but input_offsets has 8"),
        (dict.fromkeys(ragged.VECTORS, jnp.zeros(9, int)), "the 9 slices of input_offsets cannot be divided among"),
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
        assert "@ragged_all_to_all(" in text and "custom_call @jaxcomm_" not in text
    with pytest.raises(NotImplementedError, match="XLA has no ragged_all_to_all on CPUs"):
        lowered(line, "cpu", "xla")
    with pytest.raises(
        NotImplementedError,
        match="GPUs have algorithm 'direct' for groups inside a node, and otherwise 'xla'; got 'pairwise'",
    ):
        lowered(line, "cuda", "pairwise")
