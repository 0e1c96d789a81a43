"""dispatch and combine: values of all types, pytrees, derivatives and transformations, against loops of NumPy."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pairwise
import pytest
from harness import OURS, assert_same, run
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import ids_of
from test_routing import mesh_of

from jaxcomm.moe import lowering

moe = OURS.moe
DTYPES = ("bool", "int4", "int8", "uint16", "int32", "float8_e4m3fn", "bfloat16", "float16", "float32", "complex64")


def through(ids, x, weights=None, *, experts, axes="gpu", per_choice=False, scale=1, **options):
    r = moe.route(ids, axes, num_experts=experts, **options)
    rows = moe.dispatch(x, r, per_choice=per_choice)
    back = moe.combine(jax.tree.map(lambda y: y * jnp.array(scale, y.dtype), rows), r, weights, per_choice=per_choice)
    return rows, back


@pytest.mark.parametrize("dtype", DTYPES)
def test_element_types(line, rng, dtype):
    ids = ids_of("holes", rng, 8, 5, 3, 16)
    x = rng.integers(0, 2, (8, 5, 2, 3)).astype(jnp.dtype(dtype))
    slot, _, capacity = oracle.route(ids, 16)
    rows = oracle.dispatch(x, ids, slot, capacity, 16)
    total = oracle.combine(rows.astype(np.int32), ids, slot, 16) if dtype in ("bool", "int4") else None
    want = oracle.combine(rows, ids, slot, 16) if total is None else total.astype(rows.dtype)
    assert_same(run(lambda i, x: through(i, x, experts=16), line, ids, x), (rows, want))


@pytest.mark.usefixtures("both_assignments")
def test_pytrees_per_choice_and_sizes(line, rng):
    """All leaves travel in one exchange, whatever their types and widths."""
    ids = ids_of("holes", rng, 8, 4, 3, 8)
    slot, _, capacity = oracle.route(ids, 8)
    for per_choice, lead in ((False, (8, 4)), (True, (8, 4, 3))):
        x = {
            name: rng.integers(0, 2, (*lead, *end)).astype(jnp.dtype(name))
            for name, end in {
                "float32": (7,), "bfloat16": (3, 2), "bool": (), "complex64": (1,), "int8": (0,), "int4": (5,),
            }.items()
        }  # fmt: skip
        got, back = run(lambda i, x, c=per_choice: through(i, x, experts=8, per_choice=c), line, ids, x)
        want = {name: oracle.dispatch(v, ids, slot, capacity, 8, per_choice) for name, v in x.items()}
        assert_same(got, want)
        if per_choice:
            here = {n: (slot >= 0).reshape(*slot.shape, *[1] * (v.ndim - 3)) for n, v in x.items()}
            assert_same(back, {n: np.where(here[n], v, np.zeros_like(v)).astype(v.dtype) for n, v in x.items()})


@pytest.mark.parametrize("reduce", ["node", "home"])
@pytest.mark.parametrize(
    ("dtype", "algorithm"), [("bfloat16", None), ("complex64", "direct"), ("complex64", None), ("bfloat16", "xla")]
)
def test_order_of_sums(mesh, rng, monkeypatch, dtype, algorithm, reduce):
    """In bfloat16 every rounding is visible. "home" gives the same bits for one rank as for eight.

    XLA has its own collective on GPUs only. Here, jaxcomm's takes its place.
    """
    if algorithm == "xla":
        monkeypatch.setattr(lowering, "choose", lambda *_, **__: types.SimpleNamespace(backend="xla"))
        monkeypatch.setattr(lax, "ragged_all_to_all", OURS.ragged_all_to_all)
    ids, experts = ids_of("holes", rng, 8, 16, 6, 16), 16
    x, _ = pairwise.elements(rng, (8, 16, 8), dtype)
    weights = rng.integers(-8, 9, ids.shape).astype(np.float32)  # products are exact, so that FMA changes nothing

    def body(ids, x, w, axes=("node", "gpu")):
        r = moe.route(ids, axes, num_experts=experts, reduce=reduce)
        return [moe.combine(moe.dispatch(x, r), r, factors, algorithm=algorithm) for factors in (None, w)]

    found = run(body, mesh, ids, x, weights)
    slot, _, capacity = oracle.route(ids, experts)
    rows = oracle.dispatch(x, ids, slot, capacity, experts)
    for factors, got in zip((None, weights), found, strict=True):
        one, two = (oracle.combine(rows, ids, slot, experts, factors, nodes) for nodes in (1, 2))
        assert (one != two).any()
        assert_same(got, two if reduce == "node" else one, bits=True)
    if reduce == "home" and algorithm != "xla":
        whole = [a.reshape(1, -1, *a.shape[2:]) for a in (ids, x, weights)]
        alone = run(lambda *xs: body(*xs, axes="gpu"), mesh_of(1), *whole)
        assert_same([got.reshape(alone[0].shape) for got in found], alone, bits=True)
        for split in ({"node": 4, "gpu": 2}, {"node": 1, "gpu": 8}):
            other = jax.make_mesh(tuple(split.values()), tuple(split), axis_types=(jax.sharding.AxisType.Auto,) * 2)
            assert_same(run(body, other, ids, x, weights), found, bits=True)


def test_weights_of_float32_keep_their_digits(line, rng):
    """Rows are bfloat16, and 257 is not. Also with a batch of weights, and in the gradient of the weights."""
    ids = ids_of("uniform", rng, 8, 16, 2, 16)
    x, ct = (rng.integers(1, 16, (8, 16, 64)).astype(jnp.bfloat16) for _ in range(2))
    weights = np.tile(np.float32([257, -256]), (8, 16, 1))

    def body(ids, x, w, ct):
        f = lambda w: through(ids, x, w, experts=16)[1]  # noqa: E731
        return f(w), jax.vmap(f)(jnp.stack([w, 2 * w])), jax.vjp(f, w)[1](ct)[0]

    one, two, grad = run(body, line, ids, x, weights, ct)
    assert_same((one, two), (x, np.stack([x, x + x], 1)))
    products = (x.astype(np.float32) * ct.astype(np.float32)).sum(2, keepdims=True)
    assert_same(grad, np.tile(products, 2))


def test_gradients_of_rows_round_once(line, rng):
    """The product of a cotangent in bfloat16 and a weight in float32. Some leaves have no tangent or no cotangent."""
    ids = ids_of("uniform", rng, 8, 16, 1, 16)
    x, ct = (rng.standard_normal((8, 16, 4)).astype(jnp.bfloat16) for _ in range(2))
    weights = rng.standard_normal(ids.shape).astype(np.float32)

    def body(ids, x, w, ct):
        def f(x, unused):
            r = moe.route(ids, "gpu", num_experts=16)
            return moe.combine(moe.dispatch([ids, 0 * x, x, unused, x], r)[2], r, w)

        return jax.vjp(f, x, x)[1](ct)

    want = (ct.astype(np.float32) * weights).astype(jnp.bfloat16)
    assert_same(run(body, line, ids, x, weights, ct), (want, np.zeros_like(want)), bits=True)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_row_beside_those_of_a_rank_is_refused(line, slot):
    """Each rank sends one row to expert 0, in the order of ranks. Rank 1 fetches the row of its neighbour."""
    ids = np.zeros((8, 1, 1), np.int32)

    def body(ids, x):
        r = moe.route(ids, "gpu", num_experts=8)
        wrong = jnp.where(lax.axis_index("gpu") == 1, slot, r.slot)
        return moe.combine(moe.dispatch(x, r), dataclasses.replace(r, slot=wrong))

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"row {slot} of expert 0 does not belong to this rank"):
        run(body, line, ids, np.ones((8, 1, 2), np.float32))


@pytest.mark.parametrize(("field", "dtype"), [("table", jnp.float32), ("slot", jnp.int8)])
def test_routings_of_other_types_are_refused(line, field, dtype):
    def body(ids):
        r = moe.route(ids, "gpu", num_experts=8, capacity=64)
        return moe.dispatch(jnp.zeros((4, 2)), dataclasses.replace(r, **{field: getattr(r, field).astype(dtype)}))

    message = (
        f"moe.dispatch at test_dispatch_combine.py.*routing.{field} must have int32, got element type {dtype.__name__}"
    )
    with pytest.raises(TypeError, match=message):
        run(body, line, np.zeros((8, 4, 2), np.int32))


def test_results_vary(line):
    def body(ids, x):
        rows, y = through(ids, x, experts=8)
        assert all(jax.typeof(a).manual_axis_type.varying == {"gpu"} for a in (rows, y))
        return jnp.zeros(())

    f = jax.shard_map(body, mesh=line, in_specs=P(), out_specs=P())
    jax.eval_shape(f, jnp.zeros((3, 2), int), jnp.zeros((3, 4)))


def leaves(last):
    return [jnp.zeros((64, 2), dtype) for dtype in (complex, last)]


def batched(call):
    return lambda r: jax.vmap(call)(jax.tree.map(lambda x: x[None], r))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: moe.dispatch(jnp.zeros((3, 2)), r), ValueError, "dispatch: leaves of x must have shape .4, ...."),
        (lambda r: moe.dispatch(jnp.zeros((4, 3)), r, per_choice=True), ValueError, "must have shape .4, 2, ...."),
        (lambda r: moe.dispatch([], r), ValueError, "dispatch: x has no arrays"),
        (batched(lambda r: moe.combine(jnp.zeros((64, 2)), r)), NotImplementedError, "routing has a dimension of vmap"),
        (lambda r: moe.dispatch(jnp.zeros((4, 2)), {}), TypeError, "routing must be the result of jaxcomm.moe.route"),
        (lambda r: moe.dispatch(jnp.zeros((4, 2)), r, algorithm="x"), ValueError, "unknown algorithm 'x'"),
        (lambda r: moe.combine(jnp.zeros((4, 2)), r), ValueError, "combine: leaves of rows must have shape .64, ...."),
        (lambda r: moe.combine(jnp.zeros((64, 2)), r, jnp.zeros(4)), ValueError, "weights must have shape .4, 2., got"),
        (lambda r: moe.combine(jnp.zeros((64, 2)), r, jnp.zeros((4, 2), int)), TypeError, "weights must have floats"),
        (lambda r: moe.combine(leaves(int), r, jnp.zeros((4, 2))), TypeError, "rows must have floats"),
        (lambda r: moe.combine(leaves(float), r, jnp.ones((4, 2), complex)), TypeError, "weights are complex"),
        (lambda r: jax.grad(lambda x: moe.dispatch(x, r).astype(float).sum())(jnp.ones(4, "float8_e4m3fn")),
         TypeError, "dispatch at .* a gradient of float8_e4m3fn would be rounded"),
        (lambda r: moe.combine(jnp.zeros((64, 2)), r, jnp.zeros((4, 2)), per_choice=True),
         ValueError, "weights cannot be combined with per_choice"),
        (lambda r: moe.route_and_dispatch(r, r.slot, "gpu", num_experts=8, algorithm="one_shot", on_overflow="drop"),
         ValueError, "'one_shot' needs on_overflow='raise', got 'drop'"),
    ],
)  # fmt: skip
def test_wrong_arguments(line, call, error, message):
    def body(ids):
        return call(moe.route(ids, "gpu", num_experts=8, capacity=64))

    with pytest.raises(error, match=f"moe.*{message}"):
        run(body, line, np.zeros((8, 4, 2), np.int32))
