"""Lowering of moe.route_and_dispatch for GPUs: the calls that take one kernel, and those that take two calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_same, run
from test_moe_lowering import calls, targets, text

import jaxcomm
from jaxcomm import _config, _lowering, _selftest_record
from jaxcomm._core import plan
from jaxcomm._processes import placement
from jaxcomm.moe.route_and_dispatch import _route_then_dispatch
from jaxcomm.moe.row_assignment import FIELDS

TWO_CALLS = ["all_gather", "dispatch"]


def rows(x, ids, weights, **options):
    return jaxcomm.moe.route_and_dispatch(x, ids, "gpu", num_experts=8, **options)[0]


def wide(width, **options):
    """16 tokens per rank with rows of this many bytes."""

    def f(x, ids, weights):
        x = jnp.broadcast_to(x[:, :1], (len(x), width // 2))
        return rows(x, ids, weights, **options)[:, :1]

    return f


def test_few_tokens_take_one_kernel():
    (call,) = calls(text(functools.partial(rows, max_sms=7, align=4, capacity=120)))
    target, attributes, operands = call
    assert target == "moe_one_shot"
    assert operands == ["tensor<i32>", "tensor<16x2xi32>", "tensor<16x32xbf16>"]
    numbers = {"num_experts": 8, "capacity": 120, "align": 4, "slots": 0, "tokens": 16, "choices": 2, "max_sms": 7}
    for name, value in numbers.items():
        assert f"{name} = {value} : i64" in attributes, name
    assert "[16 tokens, 2 choices, 8 experts, capacity 120, rows of 32 bfloat16]" in attributes


@pytest.mark.parametrize(
    ("width", "options", "one"),
    [
        (32 << 10, {}, True),  # 512 KiB per rank
        (33 << 10, {}, False),
        (33 << 10, {"algorithm": "one_shot"}, True),
        (32 << 10, {"algorithm": "direct"}, False),
        (32 << 10, {"on_overflow": "drop"}, False),
        (1 << 20, {"algorithm": "one_shot"}, False),  # more than the slots of a communicator
        (256, {"capacity": 0}, False),
    ],
)
def test_which_sizes_take_one_kernel(width, options, one):
    assert targets(wide(width, **options)) == (["moe_one_shot"] if one else TWO_CALLS)


def test_the_gradient_is_a_combine():
    def gradient(x, ids, weights):
        return jax.grad(lambda x: rows(x, ids, weights).astype(jnp.float32).sum())(x)

    assert targets(gradient) == ["moe_one_shot", "combine"]


def test_gpus_of_several_hosts_take_route_and_dispatch(monkeypatch):
    monkeypatch.setattr(placement, "gpus_are_on_one_host", lambda mesh, rows: False)
    with pytest.raises(NotImplementedError, match="on_overflow='raise' works on CPUs, and on GPUs with jaxcomm"):
        text(rows)


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ((8, 32, 8, 256, 14336), True),
        ((8, 32, 36, 256, 14336), True),
        ((8, 32, 37, 256, 14336), False),
        ((1, 1, 1, 2**15 - 1, 0), False),
        ((1, 0, 1, 8, 4), False),
        ((1, 1, 0, 8, 4), False),
        ((8, 1, 1, 2**15, 4), False),
        ((8, 32, 8, 256, 64 << 10), False),
    ],
)
def test_the_limits_are_those_of_the_kernel(sizes, fits):
    """tests/cuda/test_route_and_dispatch.cc has the same sizes."""
    able = plan.Capabilities("cuda", measured_one_exchange=True)
    found, _ = plan.resolve_route_and_dispatch(*sizes, True, 0, plan.Placement(ranks_per_node=8), able)
    assert found == fits


FEWER = "calls with less max_sms than JAXCOMM_MAX_SMS are not measured"


@pytest.mark.parametrize(
    ("named", "max_sms", "setting", "measured", "expected"),
    [
        (False, 0, "", True, (True, "measured as faster than XLA's own collectives on these GPUs")),
        (False, 7, "", True, (False, FEWER)),
        (False, 8, "", True, (True, "measured as faster than XLA's own collectives on these GPUs")),
        (False, 7, "plans", False, (True, "few rows")),
        (True, 7, "", False, (True, "asked for")),
        (True, 0, "xla", True, (False, "JAXCOMM_ALGORITHM=xla")),
        (False, 0, "", False, (False, "jaxcomm's collectives are not measured on these GPUs with these versions")),
    ],
)
def test_what_decides_about_one_kernel(named, max_sms, setting, measured, expected):
    able = plan.Capabilities("cuda", setting=setting, measured_one_exchange=measured, max_channels=8)
    sizes = 8, 32, 8, 256, 14336
    assert plan.resolve_route_and_dispatch(*sizes, named, max_sms, plan.Placement(ranks_per_node=8), able) == expected


def test_the_record_and_the_arguments_reach_the_decision(monkeypatch):
    config = dataclasses.replace(_config.config(), algorithm=None)
    monkeypatch.setattr(_lowering, "config", lambda: config)
    assert targets(functools.partial(rows, algorithm="one_shot")) == ["moe_one_shot"]  # without a record
    monkeypatch.setattr(_selftest_record, "measured_one_exchange", lambda: True)
    monkeypatch.setattr(_selftest_record, "passed_in_graphs", lambda: True)
    assert targets(rows) == ["moe_one_shot"]
    with pytest.raises(NotImplementedError, match=FEWER):
        text(functools.partial(rows, max_sms=7))
    x = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
    options = {"platform": "cuda", "num_experts": 8, "choices": 2}
    for max_sms, default in (
        (None, "one_shot: measured"),
        (7, f"route and dispatch: {FEWER}; dispatch by xla: {FEWER}"),
    ):
        found = jaxcomm.explain("moe.route_and_dispatch", x, 8, max_sms=max_sms, **options)
        dispatch = jaxcomm.explain("moe.dispatch", x, 8, max_sms=max_sms, **options)
        assert found.default.startswith(default)
        assert dataclasses.replace(found, op=dispatch.op, default=dispatch.default) == dispatch


def test_rows_of_several_types_are_one_operand(line, rng, monkeypatch):
    """The kernel is replaced by route and dispatch of the joined rows."""

    def custom_call(site, target, **options):
        def kernel(xs, types, attributes):
            ids, rows = xs
            seen.append((rows.dtype, rows.shape[1]))
            return _route_then_dispatch(ids, rows, call=dataclasses.replace(site.call, algorithm=None))

        return kernel if target == "jaxcomm_moe_one_shot" else own(site, target, **options)

    seen, own = [], _lowering.custom_call
    monkeypatch.setattr(_lowering, "custom_call", custom_call)
    monkeypatch.setitem(_route_then_dispatch.__globals__, "takes_one_exchange", lambda *args: True)
    ids = rng.integers(-1, 8, (8, 3, 2)).astype(np.int32)
    x = {
        "narrow": rng.integers(0, 2, (8, 3, 7)).astype(bool),
        "none": np.zeros((8, 3, 0), np.float32),
        "small": rng.integers(-9, 9, (8, 3, 3)).astype(jnp.bfloat16),
        "wide": rng.standard_normal((8, 3, 2, 3)).astype(np.float32),
    }

    def body(algorithm, ids, x):
        return jaxcomm.moe.route_and_dispatch(x, ids, "gpu", num_experts=8, algorithm=algorithm)

    one, two = (run(functools.partial(body, algorithm), line, ids, x) for algorithm in ("one_shot", "direct"))
    assert seen == [(np.uint8, 7 + 2 * 3 + 4 * 6)]
    assert_same(one[0], two[0], bits=True)
    for name in FIELDS:
        assert_same(getattr(one[1], name), getattr(two[1], name), bits=True)
