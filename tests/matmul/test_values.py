"""Values of all_gather_matmul and matmul_psum_scatter: against NumPy in float64, and bit by bit against one device.

Bad arguments end in errors that name op, argument, value and what is expected.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_same, on_ranks, run
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from products import gathers, line_of, normal, scatters

import jaxcomm


def test_blocks_have_the_bits_of_one_device(rng):
    """Rows, sums over ranks, and sums over the rows of all ranks, in the documented order, in two groups."""
    n, m, k, f = 4, 8, 33, 17
    x, w, y, u = normal(rng, 8, m, k), normal(rng, 8, k, f), normal(rng, 8, n * m, k), normal(rng, 8, k, f)
    ct = normal(rng, 8, n * m, f)
    groups = [[5, 0, 3, 6], [1, 7, 2, 4]]
    ring = {"algorithm": "ring", "axis_index_groups": groups}

    def body(x, w, y, u, ct):
        rows, pull = jax.vjp(gathers(**ring), x, w)
        dx, dw = pull(ct)
        parts = jnp.concatenate([y[j * m : (j + 1) * m] @ u for j in range(n)])
        theirs = jaxcomm.psum_scatter(parts, "i", tiled=True, **ring)
        return rows, dx, dw, scatters(**ring)(y, u), theirs

    found = run(body, line_of(8), x, w, y, u, ct)
    assert_same(found[3], found[4], bits=True)
    dot, columns = jax.jit(jnp.matmul), jax.jit(lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ()))))
    add = jax.jit(jnp.add)
    transposed = jax.jit(lambda a, b: a @ b.T)

    def scattered(dot, x, w, r):
        block = slice(r * m, (r + 1) * m)
        return functools.reduce(add, [dot(x[(r + 1 + s) % n][block], w[(r + 1 + s) % n]) for s in range(n)])

    for group, r in itertools.product(groups, range(n)):
        gx, gw, gy, gu, gct = (a[group] for a in (x, w, y, u, ct))
        rows, dx, dw, sums, _ = (a[group[r]] for a in found)
        assert_same(rows, np.concatenate([dot(gx[j], gw[r]) for j in range(n)]), bits=True)
        assert_same(sums, scattered(dot, gy, gu, r), bits=True)
        assert_same(dx, scattered(transposed, gct, gw, r), bits=True)
        arrived = [(r - s) % n for s in range(n)]
        parts = [columns(gx[j], gct[r][j * m : (j + 1) * m]) for j in arrived]
        assert_same(dw, functools.reduce(add, parts), bits=True)


@pytest.mark.parametrize("algorithm", ["unfused", "ring"])
def test_integers_and_operands_of_two_types(algorithm, rng):
    """test_options_of_products.py has the other types. The common type is that of jnp.result_type."""
    n, m, k = 4, 2, 8  # n * m = k: the integers are rows and weights
    x, w = normal(rng, n, m, k), normal(rng, n, k, 3)
    small = rng.integers(-9, 9, (n, n * m, k)).astype(np.int8)

    def body(x, w, small):
        gather, half = gathers(algorithm=algorithm), x.astype("bfloat16")
        sums = scatters(algorithm=algorithm, preferred_element_type=jnp.int32)(small, small[:, :3])
        weights, full = (w.astype("bfloat16"), w), half.astype("float32")
        of_full = gather(full, w.astype("bfloat16").astype("float32")), gather(full, w)
        return sums, (*gather(half, weights), gather(half, w)), (*of_full, of_full[1])

    sums, *mixed = run(body, line_of(n), x, w, small)
    assert_same(*mixed)
    want = np.einsum("rmk,rkf->mf", np.int32(small), np.int32(small[:, :, :3]))
    assert_same(sums, want.reshape(n, m, 3).astype(np.int32))


def test_sums_of_bfloat16(rng):
    """Integers, so that float32 is exact: the roundings are those of the parts that ranks send, and of the result."""
    n, m, k, f = 4, 8, 16, 5
    y, u, ct = (rng.integers(0, 16, shape).astype(np.float32) for shape in ((n, n * m, k), (n, k, f), (n, n * m, f)))
    x = rng.integers(0, 16, (n, m, k)).astype(np.float32)

    def body(*operands):
        x, y, u, ct = (a.astype(jnp.bfloat16) for a in operands)
        _, pull = jax.vjp(gathers(algorithm="ring"), x, u)
        _, of_wide = jax.vjp(gathers(algorithm="ring", preferred_element_type=jnp.float32), x, u)
        wide = 257 * operands[-1]  # not a bfloat16
        half, of = u // 2, [gathers(algorithm=name) for name in ("ring", "unfused")]
        two = [jax.vjp(lambda x, f=f: f(x, (half, -half)), x)[1]((ct, ct - ct % 2))[0] for f in of]
        return scatters(algorithm="ring")(y, u), pull(ct)[1], of_wide(wide)[1], two

    def rounded(a):
        return np.float32(a.astype(jnp.bfloat16))

    sums, dw, dw_of_wide, two = run(body, line_of(n), x, y, u, ct)
    # Of two terms, each of which bfloat16 does not have. It has their sum.
    small = np.einsum("rmf,rkf->mk", ct % 2, u // 2).reshape(n, m, k).astype(jnp.bfloat16)
    assert_same(two, [small, small])
    exact = np.einsum("mk,rmf->rkf", x.reshape(n * m, k), ct)
    assert_same(dw, exact.astype(jnp.bfloat16))
    assert_same(dw_of_wide, (257 * exact).astype(jnp.bfloat16))
    parts = (y @ u).reshape(n, n, m, f)  # (rank, block, m, f)
    for r in range(n):
        want = parts[(r + 1) % n, r]
        for s in range(2, n + 1):
            want = rounded(want) + parts[(r + s) % n, r]
        assert_same(sums[r], want.astype(jnp.bfloat16))


def test_one_rank():
    x, w = np.float32([[[1, 2]]]), np.float32([[[3], [4]]])
    for f in (gathers, scatters):
        assert_same(run(lambda x, w, f=f: f(algorithm="ring")(x, w), line_of(1), x, w), x @ w)


def test_calls_have_the_op_its_caller_and_max_sms(rng):
    """Errors of a transfer name the public op, also in derivatives."""
    x, w = normal(rng, 2, 4, 3), normal(rng, 2, 3, 4)
    for op, name in ((gathers, "all_gather_matmul"), (scatters, "matmul_psum_scatter")):
        for algorithm in ("ring", "unfused"):

            def body(x, w, op=op, algorithm=algorithm):
                return jax.grad(lambda x, w: jnp.sum(jnp.sin(op(algorithm=algorithm, max_sms=3)(x, w))))(x, w)

            text = jax.jit(on_ranks(body, line_of(2))).lower(x, w).as_text()
            for value in (f'op = "{name}"', 'site = "test_values.py:', "max_sms = 3 : i64"):
                assert text.count(value) == text.count("custom_call @jaxcomm") == 2


def test_precision_reaches_every_product(rng):
    x, w = normal(rng, 2, 2, 3), normal(rng, 2, 3, 4)

    def text(**options):
        def body(x, w):
            return jax.grad(lambda x, w: jnp.sum(jnp.sin(gathers(algorithm="ring", **options)(x, w))), (0, 1))(x, w)

        return jax.jit(on_ranks(body, line_of(2))).trace(x, w)

    products = 2 * 3  # of 2 blocks, in the forward pass and in both derivatives
    for precision, name in (("highest", "HIGHEST"), (["highest", "default"], "DEFAULT")):
        found = text(precision=precision).lower().as_text()
        assert found.count(f"precision = [HIGHEST, {name}]") == products
    assert text().lower().as_text().count("HIGHEST") == 0
    with jax.default_matmul_precision("highest"):
        traced = text()
    assert traced.lower().as_text().count("precision = [HIGHEST, HIGHEST]") == products


X, W = jnp.ones((8, 3)), jnp.ones((3, 5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gathers()(X, jnp.ones((4, 5))), ValueError, r"all_gather_matmul: w .*k = 3.*\(8, 3\).*\(4, 5\)"),
        (lambda: gathers()(X, jnp.ones(3)), ValueError, r"all_gather_matmul: w must have the shape \(k, f\).*\(3,\)"),
        (lambda: gathers()(X, (W, W[None])), ValueError, r"w must have the shape \(k, f\).*\(1, 3, 5\)"),
        (lambda: gathers()(X, ()), ValueError, "at least one array"),
        (lambda: gathers()(X[0], W), ValueError, r"x must have rows and columns, got shape \(3,\)"),
        (lambda: gathers(axis=2)(X, W), ValueError, "axis=2 is out of range for an array of 2 dimensions"),
        (lambda: gathers(axis=-1)(X, W), ValueError, "axis=-1 is the last dimension of x"),
        (lambda: gathers(axis=1.0)(X, W), TypeError, "axis must be an integer"),
        (lambda: gathers(axis=lax.axis_index("i"))(X, W), TypeError, "_matmul: axis must be known when tracing"),
        (lambda: scatters(scatter_dimension=1)(X, W), ValueError, "scatter_dimension=1 is the last dimension of x"),
        (lambda: scatters()(X[:6], W), ValueError, r"scatter_dimension=0 .*\(6, 3\) .*cannot be split into 4"),
        (lambda: scatters()(X, (W, W)), TypeError, "w must be one array, got 2; only all_gather_matmul"),
        (lambda: gathers(algorithm="flags")(X, W), ValueError, "'flags'; pass one of unfused, ring, xla"),
        (lambda: gathers(max_sms=0)(X, W), ValueError, "max_sms must be a positive integer"),
        (lambda: gathers()(X > 0, W > 0), TypeError, "element type bool"),
        (lambda: scatters(axis_index_groups=[[0, 1], [2]])(X, W), ValueError, "axis_index_groups must have each index"),
        (lambda: jaxcomm.all_gather_matmul(X, W, "j"), NameError, "axis_name 'j' is not bound here"),
        (lambda: jaxcomm.all_gather_matmul(X, W, ()), ValueError, "at least one mesh axis"),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(on_ranks(lambda _: call(), line_of(4)), np.zeros(4, np.float32))


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_psum_scatter"])
@pytest.mark.parametrize("specs", [(P("i", "j"), P()), (P("i"), P(None, "j"))], ids=str)
def test_explicit_sharding_is_refused(op, specs):
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
    call = functools.partial(getattr(jaxcomm, op), axis_name="i")
    f = jax.shard_map(call, mesh=mesh, in_specs=(P("i"), P()), out_specs=P(), axis_names={"i"}, check_vma=False)
    with jax.set_mesh(mesh):
        operands = [jax.device_put(np.zeros((4, 4), np.float32), jax.NamedSharding(mesh, spec)) for spec in specs]
        with pytest.raises(ValueError, match=rf"{op}: an operand of shape .* is sharded over explicit mesh axes .*'j'"):
            jax.jit(f).trace(*operands)
