"""Every two options of dispatch, combine and route_and_dispatch together: values, jvp and vjp against NumPy in float64.

A layer is dispatch, a factor of each row, and combine. It is linear in the payload and in the weights.
tests/moe/oracle.py has the places of the rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pairwise
from harness import OURS, on_ranks, value
from jax.sharding import AxisType
from oracle import ids_of

moe = OURS.moe
OPTIONS = {
    "send": ["dispatch", "one_shot", "route_and_dispatch"],
    "algorithm": [None, "direct", "hierarchical"],
    "axes": [("gpu",), ("node", "gpu"), ("gpu", "node")],
    "mesh": ["vma", "no_vma", "explicit"],
    "layout": ["default", "align", "slots", "capacity"],
    "overflow": ["raise", "drop"],
    "reduce": ["node", "home"],
    "sent": ["tokens", "choices"],
    "sums": ["weighted", "plain", "choices"],
    "dtype": ["float32", "bfloat16", "float64", "complex64"],
    "weights": ["float32", "bfloat16", "complex64"],
    "ids": ["holes", "duplicates", "one rank", "none"],
    "tokens": [3, 0],
    "choices": [2, 0],
    "batch": ["alone", "x", "weights", "both", "cotangents"],
    "within": ["call", "jit", "scan", "cond"],
}
D, B, LOCAL = 3, 2, 2
LAYOUTS = {
    "raise": {"default": {}, "align": {"align": 4}, "slots": {"slots": 48}, "capacity": {"capacity": 48}},
    "drop": {"default": {}, "align": {"align": 4, "capacity": 12}, "slots": {"slots": 2}, "capacity": {"capacity": 5}},
}


def allowed(case):
    together = case["send"] != "dispatch"
    return not (
        (together and case["sent"] == "choices")
        or (case["weights"] == "complex64" != case["dtype"])
        or (case["send"] == "one_shot" and case["overflow"] == "drop")
        or (case["algorithm"] == "hierarchical" and len(case["axes"]) == 1)
        or (case["batch"] in ("weights", "both") and case["sums"] != "weighted")
        # XLA loses the sharding of empty arrays.
        or (not (case["tokens"] and case["choices"]) and case["mesh"] == "explicit")
    )


def pytest_generate_tests(metafunc):
    pairwise.parametrize(metafunc, [OPTIONS], allowed)


class Layer:
    """The layer on all ranks in float64. Rows are (8, C, D), and those of choices (8, T, K, D)."""

    def __init__(self, case, ids, options, factors):
        self.case, self.factors = case, factors
        order = np.arange(8).reshape(2, 4)
        groups = {("gpu",): order, ("node", "gpu"): order.reshape(1, 8), ("gpu", "node"): order.T.reshape(1, 8)}
        self.slot, self.owner = np.full(ids.shape, -1), np.zeros(ids.shape, int)
        for group in groups[case["axes"]]:
            self.slot[group], _, self.capacity = oracle.route(
                ids[group], LOCAL * len(group), drop=case["overflow"] == "drop", **options
            )
            self.owner[group] = group[np.maximum(ids[group], 0) // LOCAL]
        self.there = self.slot >= 0

    def place(self, each):
        rows = np.zeros((8, self.capacity, D), each.dtype)
        rows[self.owner[self.there], self.slot[self.there]] = each[self.there]
        return rows

    def fetch(self, rows):
        each = np.zeros((*self.slot.shape, D), rows.dtype)
        each[self.there] = rows[self.owner[self.there], self.slot[self.there]]
        return each

    def weigh(self, each, w):
        """A factor for each choice."""
        return each * w[..., None] if self.case["sums"] == "weighted" else each

    def value(self, x, w):
        rows = self.place(x if self.case["sent"] == "choices" else np.repeat(x[:, :, None], self.case["choices"], 2))
        each = self.weigh(self.fetch(rows * self.factors), w)
        return rows, each if self.case["sums"] == "choices" else each.sum(2)

    def vjp(self, x, w, ct):
        of_rows, of_y = ct
        each = of_y if self.case["sums"] == "choices" else np.repeat(of_y[:, :, None], self.case["choices"], 2)
        gx = self.fetch(of_rows + self.factors * self.place(self.weigh(each, w)))
        of_w = (each * self.fetch(self.value(x, w)[0] * self.factors)).sum(3) * (self.case["sums"] == "weighted")
        return gx if self.case["sent"] == "choices" else gx.sum(2), of_w


def test_options(rng, case, number):
    dtype, batch, factors = case["dtype"], case["batch"], np.array(pairwise.WITHIN[case["within"]])
    sizes = {"node": 2, "gpu": 4}
    kind = AxisType.Explicit if case["mesh"] == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), tuple(sizes), axis_types=(kind,) * 2)
    num_choices = case["choices"]
    n = 8 if len(case["axes"]) == 2 else 4
    options = LAYOUTS[case["overflow"]][case["layout"]]
    ids = ids_of(case["ids"], rng, 8, case["tokens"], num_choices, LOCAL * n)
    capacity = oracle.route(ids[:n], LOCAL * n, drop=True, **options)[2]
    scale = rng.choice([-2.0, -1, 0.5, 1, 2], (8, capacity, 1)).astype(np.float32)  # exact in all types
    layer = Layer(case, ids, options, scale)
    size = B if batch in ("x", "weights", "both") else 1
    lead = (8, size, case["tokens"], *[num_choices] * (case["sent"] == "choices"), D)
    (x, x64), (dx, dx64) = (pairwise.elements(rng, lead, dtype) for _ in range(2))
    (w, w64), (dw, dw64) = (
        pairwise.elements(rng, (8, size, case["tokens"], num_choices), case["weights"]) for _ in range(2)
    )

    def body(ids, scale, x, w, dx, dw, cts):
        def call(x, w):
            given = {"num_experts": LOCAL * n, "on_overflow": case["overflow"], "reduce": case["reduce"], **options}
            how = {"algorithm": case["algorithm"]}
            if case["send"] == "dispatch":
                r = moe.route(ids, case["axes"], **given)
                rows = moe.dispatch(x, r, per_choice=case["sent"] == "choices", **how)
            else:
                name = "one_shot" if case["send"] == "one_shot" else case["algorithm"]
                rows, r = moe.route_and_dispatch(x, ids, case["axes"], algorithm=name, **given)
            each = case["sums"] == "choices"
            weights = w if case["sums"] == "weighted" else None
            return rows, moe.combine(rows * scale.astype(x.dtype), r, weights, per_choice=each, **how)

        def batched(x, w):
            if size == 1:
                return jax.tree.map(lambda y: y[None], call(x[0], w[0]))
            x = x[0] if batch == "weights" else jnp.moveaxis(x, 0, 1)
            w = w[0] if batch == "x" else jnp.moveaxis(w, 0, 2)
            return jax.vmap(call, (None if batch == "weights" else 1, None if batch == "x" else 2))(x, w)

        def f(x, w):
            return pairwise.within(case["within"], lambda x: batched(x, w), x, tuple(sizes))

        (rows, y), (drows, dy) = jax.jvp(f, (x, w), (dx, dw))
        pull = jax.vjp(f, x, w)[1]
        one = jax.tree.map(lambda ct: ct[0], cts)
        return rows, y, drows, dy, *(jax.vmap(pull)(cts) if batch == "cotangents" else [g[None] for g in pull(one)])

    def both(x, w):
        """The operands of each element of the batch."""
        return [(x[:, b * (batch != "weights")], w[:, b * (batch != "x")]) for b in range(size)]

    def product(x, w):
        """Rows and results of all ranks: (8, results of within, batch, ...)."""
        found = zip(*(layer.value(*one) for one in both(x, w)), strict=True)
        return [np.einsum("w,rb...->rwb...", factors, np.stack(z, 1)) for z in found]

    def gradients(x, w, cts):
        given = [np.einsum("w,rwb...->rb...", factors, ct) for ct in cts]
        parts = [layer.vjp(*one, [ct[:, b] for ct in given]) for b, one in enumerate(both(x, w))]
        gx, gw = (np.stack(z, 1) for z in zip(*parts, strict=True))
        for g, shared in ((gx, batch == "weights"), (gw, batch == "x")):
            if shared:
                g[:, 0], g[:, 1:] = g.sum(1), 0
        return gx, gw

    want = product(x64, w64)
    cts = [[pairwise.elements(rng, z.shape, dtype) for _ in range(2)] for z in want]
    given = tuple(np.stack([ct for ct, _ in pair], 1) for pair in cts)
    with pairwise.environment(mesh, dtype):
        ranks = jax.NamedSharding(mesh, jax.P(tuple(sizes)))
        operands = jax.device_put((ids, scale, x, w, dx, dw, given), ranks)
        got = value(jax.jit(on_ranks(body, mesh, check_vma=case["mesh"] != "no_vma"))(*operands))
    rows, y, drows, dy, gx, gw = got
    assert {z.dtype for z in got[:5]} == {x.dtype} and gw.dtype == w.dtype
    eps = 4 * float(jnp.finfo(dtype).eps)
    of_weights = max(float(jnp.finfo(t).eps) for t in (case["weights"], "float32"))  # sums of products are at least f32
    ax, aw = np.abs(x64), np.abs(w64)
    layer.factors = np.abs(scale)
    sums, moved = product(ax, aw)[1], product(np.abs(dx64), aw)[1] + product(ax, np.abs(dw64))[1]
    bounds = [gradients(ax, aw, [np.abs(pair[i][1]) for pair in cts]) for i in range(2)]
    layer.factors = scale
    pairwise.assert_close(rows, want[0], 0, "rows")
    pairwise.assert_close(y, want[1], eps * sums, "value")
    pairwise.assert_close(drows, product(dx64, w64)[0], 0, "jvp of rows")
    tangent = product(dx64, w64)[1] + (product(x64, dw64)[1] if case["sums"] == "weighted" else 0)
    pairwise.assert_close(dy, tangent, eps * moved, "jvp")
    for i in range(2 if batch == "cotangents" else 1):
        wants = gradients(x64, w64, [pair[i][1] for pair in cts])
        pairwise.assert_close(gx[:, i], wants[0], eps * bounds[i][0], "vjp of x")
        wanted = wants[1] if case["weights"] == "complex64" else wants[1].real
        pairwise.assert_close(gw[:, i], wanted, 4 * of_weights * bounds[i][1], "vjp of weights")
