"""Every two options of collective matmul together: values, jvp and vjp against NumPy in float64.

With the rows x_j and the weights w_r of ranks j and r, a gather gives x_j w_r to rank r for all j, and a scatter gives
the sum over r of the products x_r[j] w_r to rank j, where x_r[j] is block j of the rows of rank r. Both are linear in x
and in w, so the derivatives are such products too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pairwise
from harness import on_ranks, value
from jax.sharding import AxisType

import jaxcomm

OPTIONS = {
    "op": ["gather", "scatter"],
    "algorithm": ["unfused", "ring", "xla", None],
    "axes": [("i",), ("j", "i"), ("i", "j")],
    "groups": ["one", "pairs"],
    "mesh": ["vma", "no_vma", "explicit"],
    "types": ["float32", "bfloat16", "float64", "complex64", "bfloat16 to float32"],
    "axis": [0, 1, -3],
    "rows": [2, 0],
    "columns": [(3, 2), (0, 2), (3, 0)],  # of x and of w
    "weights": ["one", "two"],
    "batch": ["alone", "x", "w", "both", "cotangents"],
    "within": ["call", "jit", "scan", "cond"],
}
SIZES = {"i": 2, "j": 2}
B = 2


def allowed(case):
    return not (
        (case["op"] == "scatter" and case["weights"] == "two")
        or (case["groups"] == "pairs" and len(case["axes"]) == 1)
        # XLA loses the sharding of empty arrays.
        or (0 in (case["rows"], *case["columns"]) and case["mesh"] == "explicit")
    )


def pytest_generate_tests(metafunc):
    pairwise.parametrize(metafunc, [OPTIONS], allowed)


def groups_of(axes, pairs):
    """Mesh positions of the ranks of each group, in rank order."""
    ids = np.arange(4).reshape(2, 2)
    rows = {("i",): ids.T, ("i", "j"): ids.reshape(1, 4), ("j", "i"): ids.T.reshape(1, 4)}[axes]
    return [row[list(group)] for row in rows for group in (pairs or [range(len(row))])]


def gather(xs, ws):
    """(n, m, 3, K) of the ranks of a group, (n, K, F): (n, n m, 3, F)."""
    y = np.einsum("jmak,rkf->rjmaf", xs, ws)
    return y.reshape(len(ws), y.shape[1] * y.shape[2], *y.shape[3:])


def gather_transpose(xs, ws, ct):
    ct = ct.reshape(len(ws), len(xs), *xs.shape[1:3], ct.shape[-1])
    return np.einsum("rjmaf,rkf->jmak", ct, ws), np.einsum("jmak,rjmaf->rkf", xs, ct)


def scatter(xs, ws):
    """(n, n m, 3, K), (n, K, F): (n, m, 3, F)."""
    y = np.einsum("rmak,rkf->maf", xs, ws)
    return y.reshape(len(ws), len(y) // len(ws), *y.shape[1:])


def scatter_transpose(xs, ws, ct):
    ct = ct.reshape(ct.shape[0] * ct.shape[1], *ct.shape[2:])
    return np.einsum("maf,rkf->rmak", ct, ws), np.einsum("rmak,maf->rkf", xs, ct)


def in_groups(f, groups, *operands):
    """f on the rows of each group. Results have the rows of all ranks."""
    results = [f(*(z[group] for z in operands)) for group in groups]
    order = np.argsort(np.concatenate(groups))
    if isinstance(results[0], tuple):
        return tuple(np.concatenate(parts)[order] for parts in zip(*results, strict=True))
    return np.concatenate(results)[order]


def test_options(rng, case, number):
    num_inner, num_outer = case["columns"]
    gathers, batch, factors = case["op"] == "gather", case["batch"], np.array(pairwise.WITHIN[case["within"]])
    dtype, wide = case["types"].split(" ")[0], "to" in case["types"]
    kind = AxisType.Explicit if case["mesh"] == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), tuple(SIZES), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    pairs = [[3, 0], [2, 1]] if case["groups"] == "pairs" else None
    groups = groups_of(case["axes"], pairs)
    n = len(groups[0])
    m = case["rows"] * (1 if gathers else n) * 2

    def call(x, w):
        """x has the rows first; `axis` says where the op gets them."""
        at = case["axis"] % 3
        more = {"preferred_element_type": jnp.float32} if wide else {}
        more |= {"axis_index_groups": pairs} if pairs else {}
        x = jnp.moveaxis(x, 0, at)
        if gathers:
            ws = (w, 2 * w) if case["weights"] == "two" else w
            y = jaxcomm.all_gather_matmul(x, ws, case["axes"], axis=case["axis"], algorithm=case["algorithm"], **more)
            y = y[0] + y[1] if case["weights"] == "two" else y
        else:
            y = jaxcomm.matmul_psum_scatter(
                x, w, case["axes"], scatter_dimension=case["axis"], algorithm=case["algorithm"], **more
            )
        return jnp.moveaxis(y, at, 0)

    def batched(x, w):
        if batch in ("alone", "cotangents"):
            return call(x[0], w[0])[None]
        x = x[0] if batch == "w" else jnp.moveaxis(x, 0, 1)
        w = w[0] if batch == "x" else jnp.moveaxis(w, 0, 2)
        return jax.vmap(call, (None if batch == "w" else 1, None if batch == "x" else 2))(x, w)

    size = 1 if batch in ("alone", "cotangents") else B
    (x, x64), (dx, dx64) = (pairwise.elements(rng, (4, size, m, 3, num_inner), dtype) for _ in range(2))
    (w, w64), (dw, dw64) = (pairwise.elements(rng, (4, size, num_inner, num_outer), dtype) for _ in range(2))
    total = 3 if case["weights"] == "two" else 1

    def both(x, w):
        """The operands of each element of the batch."""
        return [(x[:, b * (batch != "w")], w[:, b * (batch != "x")]) for b in range(size)]

    forward, transpose = (gather, gather_transpose) if gathers else (scatter, scatter_transpose)

    def product(x, w):
        """(4, results of within, batch, ...)."""
        y = np.stack([in_groups(forward, groups, *one) for one in both(x, w)], 1)
        return total * np.einsum("w,rb...->rwb...", factors, y)

    def gradients(x, w, ct):
        ct = np.einsum("w,rwb...->rb...", factors, ct) * total
        parts = [in_groups(transpose, groups, *one, ct[:, b]) for b, one in enumerate(both(x, w))]
        gx, gw = (np.stack(z, 1) for z in zip(*parts, strict=True))
        for g, shared in ((gx, batch == "w"), (gw, batch == "x")):
            if shared:
                g[:, 0], g[:, 1:] = g.sum(1), 0
        return gx, gw

    want = product(x64, w64)
    cts = [pairwise.elements(rng, want.shape, "float32" if wide else dtype) for _ in range(2)]
    (ct, _), other = cts

    def body(x, w, dx, dw, ct, ct2):
        def f(x, w):
            return pairwise.within(case["within"], lambda x: batched(x, w), x, tuple(SIZES))

        y, dy = jax.jvp(f, (x, w), (dx, dw))
        pull = jax.vjp(f, x, w)[1]
        found = jax.vmap(pull)(jnp.stack([ct, ct2])) if batch == "cotangents" else [g[None] for g in pull(ct)]
        return y, dy, tuple(found)

    with pairwise.environment(mesh, dtype):
        f = jax.jit(on_ranks(body, mesh, check_vma=case["mesh"] != "no_vma"))
        ranks = jax.NamedSharding(mesh, jax.P(tuple(SIZES)))
        y, dy, (gx, gw) = value(f(*(jax.device_put(z, ranks) for z in (x, w, dx, dw, ct, other[0]))))
    assert (y.dtype, dy.dtype, gx.dtype, gw.dtype) == (*["float32" if wide else dtype] * 2, dtype, dtype)
    # Of the products, of the sums of a ring, which rounds once per rank, and of the two weights.
    eps = 4 * float(jnp.finfo("float32" if wide else dtype).eps)
    ax, aw = np.abs(x64), np.abs(w64)
    pairwise.assert_close(y, want, eps * product(ax, aw), "value")
    bound = product(np.abs(dx64), aw) + product(ax, np.abs(dw64))
    pairwise.assert_close(dy, product(dx64, w64) + product(x64, dw64), eps * bound, "jvp")
    eps = 4 * float(jnp.finfo(dtype).eps)
    for i, (_, one) in enumerate(cts if batch == "cotangents" else cts[:1]):
        wants, bounds = gradients(x64, w64, one), gradients(ax, aw, np.abs(one))
        for got, wanted, bound, name in zip((gx, gw), wants, bounds, ("vjp of x", "vjp of w"), strict=True):
            pairwise.assert_close(got[:, i], wanted, eps * bound, name)
