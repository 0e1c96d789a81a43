"""Lowering of jaxcomm.moe for GPUs: which custom calls a layer has, with which operands and attributes."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import run
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _config, _lowering, _selftest_record
from jaxcomm._processes import placement
from jaxcomm.moe import check, choice, routing, row_assignment

TOKENS, CHOICES, EXPERTS, WIDTH = 16, 2, 8, 32


def layer(x, ids, weights, axes=("gpu",), **route):
    options = {key: route.pop(key) for key in ("algorithm", "max_sms") if key in route}
    routing = jaxcomm.moe.route(ids, axes, num_experts=EXPERTS, **route)
    rows = jaxcomm.moe.dispatch(x, routing, **options)
    return jaxcomm.moe.combine(rows, routing, weights, **options)


def text(f, dtype=jnp.bfloat16, shape=(4,), platform="cuda"):
    names = ("node", "gpu")[-len(shape) :]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    n = int(np.prod(shape))
    args = (
        jax.ShapeDtypeStruct((n * TOKENS, WIDTH), dtype),
        jax.ShapeDtypeStruct((n * TOKENS, CHOICES), jnp.int32),
        jax.ShapeDtypeStruct((n * TOKENS, CHOICES), jnp.float32),
    )
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(names), out_specs=P(names)))
    return mapped.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(lowered):
    """Target, attributes and types of the operands of every custom call of jaxcomm's."""
    found = re.findall(r"custom_call @jaxcomm_(\w+)\(.*?(mhlo\.backend_config = .*?)\} : \((.*?)\) ->", lowered)
    return [(target, attributes, types.split(", ")) for target, attributes, types in found]


def targets(f, *args, **kwargs):
    return [target for target, _, _ in calls(text(f, *args, **kwargs))]


def test_a_layer_is_three_calls_without_any_of_xlas():
    lowered = text(functools.partial(layer, max_sms=7))
    found = calls(lowered)
    assert [target for target, _, _ in found] == ["all_gather", "dispatch", "combine"]
    assert not re.search(r"all_to_all|all_reduce|collective_permute|stablehlo\.all_gather|ragged", lowered)
    capacity = 4 * TOKENS * 2
    of_dispatch, of_combine = found[1:]
    routing = f"tensor<{TOKENS}x{CHOICES}xi32>"
    table = f"tensor<4x4x{EXPERTS}xi32>"
    assert of_dispatch[2] == ["tensor<i32>", f"tensor<{TOKENS}x{WIDTH}xbf16>", f"tensor<{TOKENS * CHOICES}xi32>", table]
    assert of_combine[2] == [
        "tensor<i32>", f"tensor<{capacity}x{WIDTH}xbf16>", routing, routing, f"tensor<{TOKENS}x{CHOICES}xf32>", table
    ]  # fmt: skip
    common = {"row_count": WIDTH, "choices": CHOICES, "num_experts": EXPERTS, "per_choice": 0, "max_sms": 7}
    for _, attributes, _ in (of_dispatch, of_combine):
        for name, value in common.items():
            assert f"{name} = {value} : i64" in attributes, name
    assert "weighted = 1 : i64" in of_combine[1]


def test_the_gradient_is_made_of_the_same_calls():
    def gradient(x, ids, weights):
        def loss(x, weights):
            return layer(x, ids, weights).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(x, weights)

    # Forward; rows and weights of the transpose of combine; weights; x.
    expected = ["all_gather", "dispatch", "dispatch", "combine", "dispatch", "dispatch", "combine"]
    assert sorted(targets(gradient)) == sorted(expected)


@pytest.mark.parametrize(
    ("dtype", "reduce", "shape", "hosts", "per_choice"),
    [
        (jnp.float32, "node", (4,), False, False),
        (jnp.float64, "node", (4,), False, False),
        (jnp.float16, "home", (2, 2), False, False),
        (jnp.float32, "node", (2, 2), False, True),  # sums of nodes are rounded, in XLA's program
        (jnp.int32, "node", (4,), False, True),
        (jnp.complex64, "node", (4,), False, True),
        (jnp.float8_e4m3fn, "node", (4,), False, True),
        (jnp.float32, "home", (4,), True, False),
        (jnp.int32, "node", (4,), True, True),
        (jnp.complex64, "node", (4,), True, True),
    ],
)
def test_sums_that_the_kernel_lacks_fetch_the_row_of_each_choice(monkeypatch, dtype, reduce, shape, hosts, per_choice):
    monkeypatch.setattr(placement, "gpus_are_on_one_host", lambda mesh, rows: not hosts)
    algorithm = {"algorithm": "hierarchical"} if hosts else {}

    def f(x, ids, weights):
        inexact = jnp.issubdtype(dtype, jnp.inexact)
        axes = ("node", "gpu")[-len(shape) :]
        return layer(x, ids, weights if inexact else None, axes=axes, reduce=reduce, **algorithm)

    name = "combine_eager" if hosts else "combine"
    with jax.enable_x64(dtype == jnp.float64):
        (combine,) = [found for found in calls(text(f, dtype=dtype, shape=shape)) if found[0] == name]
    assert f"per_choice = {int(per_choice)} : i64" in combine[1]
    assert combine[2][4].endswith("xf64>" if dtype == jnp.float64 else "xf32>")  # weights
    if hosts:
        assert f"home = {int(reduce == 'home')} : i64" in combine[1]


def test_gpus_of_several_hosts_and_untested_ones_use_xlas_collective(monkeypatch):
    drop = functools.partial(layer, on_overflow="drop")
    advice = r"test_moe_lowering\.py.*on_overflow='raise' works on CPUs, and on GPUs with jaxcomm.*on_overflow='drop'"
    with monkeypatch.context() as hosts:
        hosts.setattr(placement, "gpus_are_on_one_host", lambda mesh, rows: False)
        assert targets(drop) == ["all_gather_eager"]
        with pytest.raises(NotImplementedError, match=advice):
            text(layer)
    with monkeypatch.context() as untested:
        untested.setattr(_lowering, "config", lambda: dataclasses.replace(_config.config(), algorithm=None))
        assert targets(drop) == []
        assert "ragged_all_to_all" in text(drop)
        with pytest.raises(NotImplementedError, match=advice):
            text(layer)
    assert targets(functools.partial(drop, algorithm="xla")) == ["all_gather"]
    # The route would be checked by the kernel alone.
    with pytest.raises(NotImplementedError, match=advice):
        text(functools.partial(layer, algorithm="xla"))


RAILS = ["all_gather_eager", "dispatch_eager", "combine_eager"]


@pytest.fixture
def several_hosts(monkeypatch):
    monkeypatch.setattr(placement, "gpus_are_on_one_host", lambda mesh, rows: False)


def test_hierarchical_calls_of_several_hosts_are_jaxcomms_own_kernels(monkeypatch, several_hosts):
    nodes = functools.partial(layer, axes=("node", "gpu"), algorithm="hierarchical")

    def gradient(x, ids, weights):
        return jax.grad(lambda *args: nodes(args[0], ids, args[1]).astype(jnp.float32).sum(), (0, 1))(x, weights)

    found = calls(text(nodes, shape=(2, 2)))
    assert [target for target, _, _ in found] == RAILS
    for _, attributes, _ in found[1:]:
        assert 'algorithm = "hierarchical"' in attributes
    assert "home = 0 : i64" in found[2][1] and "weighted = 1 : i64" in found[2][1]
    assert "ragged_all_to_all" not in text(nodes, shape=(2, 2))
    # As inside a node: see test_the_gradient_is_made_of_the_same_calls.
    names = sorted(RAILS + ["dispatch_eager"] * 3 + ["combine_eager"])
    assert sorted(targets(gradient, shape=(2, 2))) == names
    # The kernels check the routing, XLA's collective does not.
    assert "stablehlo.negate" in text(nodes, shape=(2, 2))
    monkeypatch.setattr(_lowering, "config", lambda: dataclasses.replace(_config.config(), algorithm="xla"))
    assert targets(functools.partial(nodes, on_overflow="drop"), shape=(2, 2)) == []


@pytest.mark.parametrize("on_overflow", ["drop", "raise"])
def test_hierarchical_on_one_host_is_the_kernel_inside_a_node(on_overflow):
    """A program for several hosts runs on one too."""
    line = functools.partial(layer, on_overflow=on_overflow, algorithm="hierarchical")
    assert targets(line) == ["all_gather", "dispatch", "combine"]
    assert targets(functools.partial(line, axes=("node", "gpu")), shape=(2, 2)) == targets(line)
    assert targets(line, shape=(1,)) == ["dispatch", "combine"]


def test_several_hosts_by_default(monkeypatch, several_hosts):
    """The kernels between nodes if the self-test has passed there, and if they take the sizes."""
    drop = functools.partial(layer, on_overflow="drop")
    monkeypatch.setattr(_selftest_record, "passed_between_nodes", lambda collective: True)
    assert targets(layer) == targets(drop) == RAILS
    for _, attributes, _ in calls(text(layer))[1:]:
        assert 'algorithm = "hierarchical"' in attributes  # the kernels run where Python has chosen them only
    assert targets(functools.partial(drop, algorithm="xla")) == ["all_gather_eager"]
    monkeypatch.setattr(_selftest_record, "passed_between_nodes", lambda collective: False)
    assert targets(drop) == ["all_gather_eager"]


def test_the_gradient_decides_about_the_layer_between_nodes(monkeypatch, several_hosts):
    """It dispatches a row per choice, with a bit of shared memory for each. All calls are jaxcomm's, or none.

    48 KiB are 12 KiB of moves, 8 experts of 4 bytes, and 12 bytes for 64 choices: tests/test_resolve.py.
    """
    monkeypatch.setattr(_selftest_record, "passed_between_nodes", lambda collective: True)

    def gradient(x, ids, weights, **route):
        loss = lambda *args: layer(args[0], ids, args[1], **route).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, (0, 1))(x, weights)

    most = ((48 << 10) - (12 << 10) - 4 * EXPERTS) // 12 * 64 // CHOICES
    monkeypatch.setitem(globals(), "TOKENS", most)
    assert targets(layer) == RAILS
    assert sorted(targets(gradient)) == sorted(RAILS + ["dispatch_eager"] * 3 + ["combine_eager"])
    monkeypatch.setitem(globals(), "TOKENS", most + 1)
    for f in (layer, gradient):
        assert targets(functools.partial(f, on_overflow="drop")) == ["all_gather_eager"]
        with pytest.raises(NotImplementedError, match=rf"{CHOICES * (most + 1)} choices of a rank, 2 per token, and 8"):
            text(f)
    assert targets(functools.partial(layer, algorithm="hierarchical")) == RAILS  # the gradient would be refused


def test_unknown_ids_are_negative_sizes():
    """The kernel recognizes them. Elsewhere the table stays as it is."""
    table = jnp.array([[3, 1, 0], [2, 2, 5]], jnp.int32)
    marked = check._mark(table, types.SimpleNamespace(align=1, capacity=9))
    np.testing.assert_array_equal(marked, [[3, 1, 0], [-5, 2, 5]])
    negates = r"stablehlo\.negate %\w+ : tensor<4xi32>"  # the last column, of 4 ranks
    assert re.search(negates, text(layer))
    assert not re.search(negates, text(functools.partial(layer, on_overflow="drop")))


@pytest.mark.parametrize(("n", "local", "align"), [(1, 1, 4), (2, 1, 4), (3, 2, 8), (4, 3, 1)])
def test_the_kernel_sees_an_overflow_by_padding(rng, n, local, align):
    """It compares the end of each slice with the begin of the next one, and with the number of slots."""
    seen = set()
    for _ in range(40):
        table = rng.integers(0, 4, (n, n * local + 1)).astype(np.int32)
        table[:, -1] = 0
        groups = -(-table[:, :-1].sum(0).reshape(n, local) // align) * align
        demand = groups.sum(1)
        capacity = int(demand.max() - rng.integers(0, 3))
        starts = (np.cumsum(groups, 1) - groups).reshape(-1).astype(np.int32)
        marked = check._mark(jnp.asarray(table), types.SimpleNamespace(align=align, capacity=capacity))
        _, sizes, outputs, _ = np.asarray(row_assignment.slices(marked[:, :-1], starts)).transpose(1, 0, 2)
        ends = (outputs + sizes).max(0).reshape(n, local)
        limits = np.concatenate([starts.reshape(n, local)[:, 1:], np.full((n, 1), capacity)], 1)
        overfull = (ends > limits).any(1)
        np.testing.assert_array_equal(overfull, demand > capacity)
        np.testing.assert_array_equal(ends.max(1)[overfull], demand[overfull])  # as CPUs say it
        if not overfull.any():
            np.testing.assert_array_equal(marked, table)
        seen.add(bool(overfull.any()))
    assert seen == {True, False}


@pytest.mark.parametrize(
    "options", [{"capacity": 6, "align": 4}, {"capacity": 5}, {"slots": 2}, {"capacity": 0}], ids=str
)
@pytest.mark.parametrize("unknown", [False, True])
def test_groups_after_an_overflow_stay_inside_the_slots(line, monkeypatch, options, unknown):
    """On GPUs, the rest of the program runs on."""
    monkeypatch.setattr(routing, "check_p", types.SimpleNamespace(bind=lambda table, call: [check._mark(table, call)]))
    monkeypatch.setattr(choice, "assigns_by_custom_calls", lambda platform: False)

    def body(ids):
        r = jaxcomm.moe.route(ids, "gpu", num_experts=16, **options)
        return r.group_sizes, r.group_counts

    ids = np.ones((8, 4, 2), np.int32)
    if unknown:
        ids[3] = 16  # the mark makes the size of expert 0 negative
    sizes, counts = run(body, line, ids)
    slots = options.get("capacity", 2 * options.get("slots", 0))
    assert (counts >= 0).all() and (counts <= sizes).all() and (sizes.sum(1) <= slots).all()
