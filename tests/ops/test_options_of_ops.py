"""Every two options of an op together: values, jvp and vjp against NumPy in float64.

An op that is linear is a matrix M, which the oracle gives on unit vectors. The value is M x, the jvp is M dx, and the
vjp is the transpose of M times the cotangent. pmax and pmin have values only.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pairwise
import pytest
import reference
from harness import OURS, assert_same, on_ranks, value
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm import _xla_hierarchical
from jaxcomm._request import NATIVE

# Arguments of an op, and its block without the last dimension, for groups of n ranks.
ARGUMENTS = {
    "psum": [lambda n: ({}, (2,))],
    "pmean": [lambda n: ({}, (2,))],
    "pmax": [lambda n: ({}, (2,))],
    "pmin": [lambda n: ({}, (2,))],
    "barrier": [lambda n: ({}, (2,))],
    "all_gather": [
        lambda n: ({"axis": 0, "tiled": True}, (2, 3)),
        lambda n: ({"axis": -2, "tiled": True}, (3, 2)),
        lambda n: ({"axis": 0}, (2, 3)),
        lambda n: ({"axis": -1}, (2,)),
        lambda n: ({"axis": 1, "tiled": True, "to": "invarying"}, (2, 3)),
    ],
    "psum_scatter": [
        lambda n: ({"scatter_dimension": 0, "tiled": True}, (2 * n, 3)),
        lambda n: ({"scatter_dimension": -2, "tiled": True}, (3, n)),
        lambda n: ({"scatter_dimension": 0}, (n, 2)),
        lambda n: ({"scatter_dimension": -2}, (2, n)),
    ],
    "all_to_all": [
        lambda n: ({"split_axis": 0, "concat_axis": 0, "tiled": True}, (2 * n, 2)),
        lambda n: ({"split_axis": 0, "concat_axis": -2, "tiled": True}, (n, 3)),
        lambda n: ({"split_axis": 1, "concat_axis": 0}, (2, n)),
        lambda n: ({"split_axis": 0, "concat_axis": -1}, (n, 2)),
        lambda n: ({"split_axis": -2, "concat_axis": -2}, (2, n)),
    ],
    "ppermute": [
        lambda n: ({"perm": [(i, (i + 1) % n) for i in range(n) if i != 1]}, (2,)),
        lambda n: ({"perm": [(i, n - 1 - i) for i in range(n)]}, (2,)),
        lambda n: ({"perm": []}, (2,)),
    ],
    "pbroadcast": [lambda n: ({"source": n // 2}, (2,)), lambda n: ({"source": n - 2}, (2,))],
}
SUMS = ("psum", "pmean", "psum_scatter")
ORDERED = ("pmax", "pmin")  # no derivatives
EQUAL = ("psum", "pmean", *ORDERED)  # on all ranks of one group
STARTED = ("all_gather", "all_to_all", "pbroadcast", "ppermute", "psum", "psum_scatter")
ONE_AXIS = ("all_gather", "ppermute", "psum_scatter")  # if it is an axis of vmap
OPTIONS = {
    "axes": [("gpu",), ("node",), ("node", "gpu"), ("gpu", "node")],
    "groups": ["one", "pairs", "order"],  # pairs of two ranks are groups of one
    # Which axes are manual, and the types of the others: x is sharded over the axis node.
    "mesh": ["vma", "no_vma", "explicit", "partly_auto", "partly_explicit"],
    "algorithm": ["chosen", "any", "xla", "xla_hierarchical"],
    "dtype": ["float32", "bfloat16", "float64", "complex64", "int8"],
    "batch": ["alone", "middle", "constant", "named", "named_last", "unbatched"],
    "within": ["call", "jit", "scan", "cond"],
    "calls": ["at_once", "started", "after"],
    "operand": ["varies", "same"],
    "size": [2, 0],
    "donated": [False, True],
}
SIZES = {"node": 2, "gpu": 4}


def allowed(case):
    op, partly = case["op"], case["mesh"].startswith("partly")
    named, groups = case["batch"] in NAMED, case["groups"] != "one"
    invarying = "to" in ARGUMENTS[op][case["arguments"]](1)[0]
    return not (
        (case["calls"] != "at_once" and op not in STARTED)
        or (groups and (op in ("pbroadcast", "ppermute") or named or invarying))
        or (partly and (case["axes"] != ("gpu",) or named))
        # XLA does not compile its own sums of 16 bits here, and loses the sharding of empty arrays.
        or (partly and (case["operand"] == "same" or (case["dtype"] == "bfloat16" and op in SUMS)))
        or ("explicit" in case["mesh"] and not case["size"])
        or (case["algorithm"] == "xla_hierarchical" and NATIVE[op] not in _xla_hierarchical.COMPOSITIONS)
        or (case["dtype"] == "complex64" and op in ORDERED)
        or (invarying and (named or case["mesh"] in ("no_vma", "partly_auto")))
    )


@dataclasses.dataclass
class Expected:
    """The op in float64. Operands are (ranks, batch, *block), results (ranks, results of within, batch, *block)."""

    oracle: Callable  # (ranks, *block, columns) -> (ranks, *results, columns)
    ranks: tuple  # (R,), or (R, size) if the batch is an axis of vmap
    block: tuple
    batch: np.ndarray  # (results, elements): each result is the op of this combination of the elements of the batch
    factors: np.ndarray  # of the results of within()

    @functools.cached_property
    def matrix(self):
        """(results of all ranks, operands of all ranks)."""
        size = math.prod((*self.ranks, *self.block))
        y = self.oracle(np.eye(size).reshape(math.prod(self.ranks), *self.block, size))
        return y.reshape(math.prod(y.shape[:-1]), size)

    def on_ranks(self, f, x):
        """f, a function like the oracle, for each element of the batch."""
        if len(self.ranks) == 2:
            y = f(x.reshape(math.prod(self.ranks), *x.shape[2:], 1))
            return y.reshape(*self.ranks, *y.shape[1:-1])
        return np.moveaxis(f(np.moveaxis(x, 1, -1)), -1, 1)

    def value(self, x, f=None):
        y = np.einsum("sb,rb...->rs...", self.batch, self.on_ranks(f or self.oracle, x))
        return np.einsum("w,rs...->rws...", self.factors, y)

    def vjp(self, ct, matrix):
        ct = np.einsum("w,sb,rws...->rb...", self.factors, self.batch, ct)

        def transpose(ct):
            x = matrix.T @ ct.reshape(matrix.shape[0], ct.shape[-1])
            return x.reshape(math.prod(self.ranks), *self.block, ct.shape[-1])

        return self.on_ranks(transpose, ct)

    def bounds(self, x, ct):
        """The sums of the magnitudes that are added."""

        def add(x):
            y = self.oracle(x)
            return (np.abs(self.matrix) @ x.reshape(self.matrix.shape[1], x.shape[-1])).reshape(y.shape)

        return self.value(np.abs(x), add), self.vjp(np.abs(ct), np.abs(self.matrix))


NAMED = ("named", "named_last", "unbatched")  # the batch is an axis of the call; the operand is the same along it
BATCHES = {
    "alone": [[1]],
    "middle": np.eye(2),
    "named": np.eye(2),
    "named_last": np.eye(2),
    "unbatched": np.eye(2),
    "constant": [[1], [2]],
}  # fmt: skip


def batched(kind, f, x):
    """f on (batch, *block)."""
    if kind == "alone":
        return f(x[0])[None]
    if kind == "constant":
        return jax.vmap(lambda s: f(s * x[0]))(jnp.array([1, 2], x.dtype))
    if kind == "middle":
        return jnp.moveaxis(jax.vmap(f, 1, -1)(jnp.moveaxis(x, 0, 1)), -1, 0)
    if kind == "named_last":
        return jax.vmap(f, -1, axis_name="v")(jnp.moveaxis(x, 0, -1))
    if kind == "unbatched":
        return jax.vmap(lambda _: f(x[0]), axis_name="v")(jnp.arange(2))
    return jax.vmap(f, axis_name="v" if kind == "named" else None)(x)


def called(kind, op, x, axis_name, **kwargs):
    if kind == "at_once":
        y = getattr(OURS, op)(x, axis_name, **kwargs)
    else:
        after = {"wide": jnp.cos(x), "rest": [x[:1] != 0, 3.0]} if kind == "after" else ()
        y = getattr(OURS, f"{op}_start")(x, axis_name, after=after, **kwargs).done(after=after)
    equal = kwargs.get("to") == "invarying" or (op in EQUAL and "axis_index_groups" not in kwargs)
    varying, tracked = (jax.typeof(z).manual_axis_type.varying for z in (y, lax.axis_index(axis_name)))
    assert varying & tracked == (frozenset() if equal else tracked)
    return y


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    # Ops with the same arguments share a table.
    tables = [("psum", "pmean", "pmax", "pmin", "barrier"), *((op,) for op in ARGUMENTS if len(ARGUMENTS[op]) > 1)]
    options = [{"op": ops, "arguments": range(len(ARGUMENTS[ops[0]])), **OPTIONS} for ops in tables]
    pairwise.parametrize(metafunc, options, allowed)


@jax.custom_vjp
def unread(x):
    """The identity. Its cotangent is a symbolic zero."""
    return x


unread.defvjp(lambda x: (x, None), lambda _, ct: (None,))


@pytest.mark.parametrize("calls", ["at_once", "started"])
def test_an_axis_of_vmap_alone(rng, calls):
    """Which needs no shard_map."""
    for op in ARGUMENTS if calls == "at_once" else STARTED:
        arguments, block = ARGUMENTS[op][0](4)
        x = rng.integers(-9, 9, (4, *block, 2)).astype(np.float32)
        f = functools.partial(called, calls, op, axis_name=("v",), **arguments)
        got = jax.jit(jax.vmap(f, 1, 1, axis_name="v", axis_size=4))(x.swapaxes(0, 1)).swapaxes(0, 1)
        assert_same(got, reference.on_mesh(getattr(reference, op), x, {"v": 4}, ("v",), **arguments))


@pytest.mark.parametrize("calls", ["at_once", "started"])
def test_results_without_cotangents(mesh, calls):
    """Their transposes have no calls."""
    ops = [op for op in ARGUMENTS if op not in ORDERED and (calls == "at_once" or op in STARTED)]

    def loss(x):
        found = [OURS.reshard_in(x, "gpu", P("gpu"), P())]
        found.append(OURS.ragged_all_to_all(x, x, *[jnp.zeros(4, int)] * 4, axis_name="gpu"))
        for op in ops:
            arguments, block = ARGUMENTS[op][0](4)
            found.append(called(calls, op, jnp.full((*block, 1), x[0]), ("gpu",), **arguments))
        return x.sum() + sum(unread(y).sum() for y in found)

    x = np.ones((8, 3), np.float32)
    f = jax.jit(on_ranks(jax.grad(loss), mesh, check_vma=False))
    assert_same(value(f(x)), x)
    assert "@jaxcomm_" not in f.lower(x).as_text()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_options(rng, case, number):
    op = case["op"]
    partly, dtype, kind = case["mesh"].startswith("partly"), case["dtype"], case["batch"]
    types = (AxisType.Explicit if "explicit" in case["mesh"] else AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=types)
    sizes = {"gpu": SIZES["gpu"]} if partly else SIZES
    axes = case["axes"]
    if kind in NAMED:  # not all ops take it together with other axes
        alone = op in ONE_AXIS or number % 3 == 0
        axes = ("v",) if alone else ("v", *axes) if number % 3 == 1 else (*axes, "v")
    virtual = {**sizes, "v": 2} if kind in NAMED else sizes
    n = math.prod(virtual[a] for a in axes)
    more = {}
    if case["groups"] != "one":
        order = np.array(collective.ORDERS[n])
        n //= 2 if case["groups"] == "pairs" else 1
        more["axis_index_groups"] = order.reshape(-1, n).tolist()
    arguments, block = ARGUMENTS[op][case["arguments"]](n)
    block = (*block, case["size"])
    if case["algorithm"] == "any":
        fitting = collective.fitting(op, *(({"g": n}, ("g",)) if more or kind in NAMED else (sizes, axes)))
        more["algorithm"] = fitting[number % len(fitting)]
    elif case["algorithm"] != "chosen":
        more["algorithm"] = case["algorithm"]

    def oracle(x):
        x = x.reshape(*virtual.values(), *x.shape[1:])
        given = dict(arguments)
        for name in ("axis", "split_axis", "concat_axis", "scatter_dimension"):
            if name in given:
                new = op == "all_gather" and not given.get("tiled")
                given[name] %= len(block) + new
        given.pop("to", None)
        y = reference.on_mesh(getattr(reference, op), x, virtual, axes, more.get("axis_index_groups"), **given)
        return y.reshape(math.prod(virtual.values()), *y.shape[len(virtual) :])

    num_ranks = math.prod(sizes.values())
    elements_of_batch = np.array(BATCHES[kind])
    expected = Expected(
        oracle,
        (num_ranks, 2) if kind in NAMED else (num_ranks,),
        block,
        elements_of_batch,
        np.array(pairwise.WITHIN[case["within"]]),
    )

    def body(x):
        f = functools.partial(called, case["calls"], op, axis_name=axes, **arguments, **more)
        return pairwise.within(case["within"], functools.partial(batched, kind, f), x[0], tuple(sizes))[None]

    ranks = P("gpu" if partly else tuple(sizes))
    same = case["operand"] == "same"
    f = jax.shard_map(
        body, mesh=mesh, in_specs=P() if same else ranks, out_specs=ranks,
        axis_names={"gpu"} if partly else set(sizes), check_vma=case["mesh"] not in ("no_vma", "partly_auto"),
    )  # fmt: skip

    size = elements_of_batch.shape[1]
    shape = (1 if same else num_ranks, 1 if kind == "unbatched" else size, *block)
    (x, x64), (dx, dx64) = (pairwise.elements(rng, shape, dtype) for _ in range(2))
    whole, dwhole = (np.broadcast_to(z, (num_ranks, size, *block)) for z in (x64, dx64))
    want = expected.value(whole)
    ct, ct64 = pairwise.elements(rng, want.shape, dtype)
    derivable = dtype != "int8" and op not in ORDERED

    def program(x, dx, ct):
        if not derivable:
            return f(x)
        y, pull = jax.vjp(f, x)
        if "explicit" in case["mesh"]:
            ct = jax.sharding.reshard(ct, jax.typeof(y).sharding)
        return *jax.jvp(f, (x,), (dx,)), *pull(ct)

    def place(z, spec):
        if partly:
            spec = P(*spec, *[None] * (z.ndim - len(spec) - 1), "node")
        return jax.device_put(z, NamedSharding(mesh, spec))

    with pairwise.environment(mesh, dtype):
        operands = place(x, P() if same else ranks), place(dx, P() if same else ranks), ct
        got = jax.jit(program, donate_argnums=(0, 1) if case["donated"] else ())(*operands)
    assert case["mesh"] != "partly_explicit" or "node" in jax.tree.leaves(got)[0].sharding.spec
    got = value(got)
    if not derivable:
        assert op == "pmean" or got.dtype == x.dtype
        eps = 4 * jnp.finfo(got.dtype).eps if op == "pmean" else 0
        pairwise.assert_close(got, want, eps * np.abs(want), "value")
        return
    eps = 4 * float(jnp.finfo(dtype).eps)
    y, dy, gx = got
    of_value, of_vjp = expected.bounds(whole, ct64)
    assert y.dtype == dy.dtype == gx.dtype == x.dtype
    moves = op not in SUMS
    pairwise.assert_close(y, want, 0 if moves else eps * of_value, "value")
    pairwise.assert_close(dy, expected.value(dwhole), 0 if moves else eps * expected.bounds(dwhole, ct64)[0], "jvp")
    wanted = expected.vjp(ct64, expected.matrix)
    for d, shared in enumerate((same, kind == "unbatched")):
        if shared:
            wanted, of_vjp = wanted.sum(d, keepdims=True), of_vjp.sum(d, keepdims=True)
    pairwise.assert_close(gx, wanted, eps * of_vjp, "vjp")
