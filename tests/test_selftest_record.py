"""The defaults on GPUs that depend on the record of python -m jaxcomm.selftest."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from harness import OURS, on_ranks
from test_selftest import GPU_KEY, forget, own_cache  # noqa: F401

import jaxcomm
from jaxcomm import _config, _lowering, _request, _selftest_record, selftest
from jaxcomm._core import plan
from jaxcomm._measure import timing
from jaxcomm._selftest_record import EXPERTS, GRAPHS, ONE_EXCHANGE, PLANS, PROGRAMS, SLICES, TYPES, Row


def passed(feature, op, size=8, us=None, wrong=0, ranks=2, per_node=2, dtype="float32", ran="direct"):
    return Row(feature, op, dtype, size, ranks, per_node, wrong, *(us or (None, None)), ran=ran)


FAST, SLOW = (1.0, 2.0), (2.0, 1.0)
TYPED = passed(TYPES, "psum", dtype="bfloat16,float32")
ANY_SIZE = _selftest_record.ANY_SIZE


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([TYPED], []),
        ([passed(PLANS, "psum", 8, FAST)], [("all_reduce", 2, 2, 8, 8, "direct")]),
        (
            [TYPED, passed(PLANS, "psum", 8, SLOW), passed(PLANS, "psum", 64, FAST)],
            [("all_reduce", 2, 2, 64, 64, "direct")],
        ),
        (
            [passed(PLANS, "all_gather", size, us) for size, us in ((512, FAST), (8, FAST), (64, SLOW), (4096, FAST))],
            [("all_gather", 2, 2, 8, 8, "direct"), ("all_gather", 2, 2, 512, 4096, "direct")],
        ),
        (  # sizes between two plans, and beside one of XLA's, are XLA's
            [
                passed(PLANS, "psum", size, us, ran=ran)
                for size, us, ran in (
                    *((64, FAST, "ring"), (512, FAST, "ring"), (1024, FAST, "ring"), (4096, FAST, "tree")),
                    *((1 << 20, SLOW, "tree"), (1 << 24, FAST, "tree")),
                )
            ],
            [
                ("all_reduce", 2, 2, begin, end, ran)
                for begin, end, ran in ((64, 1024, "ring"), (4096, 4096, "tree"), (1 << 24, 1 << 24, "tree"))
            ],
        ),
        (
            [passed(PLANS, "all_gather", 8, FAST), passed(PLANS, "all_gather", 8, FAST, ranks=8, per_node=4)],
            [("all_gather", 2, 2, 8, 8, "direct")],  # NVLink may connect the hosts
        ),
        (
            [
                passed(PLANS, "all_gather", 8, FAST, ranks=8, per_node=4, ran="hierarchical"),
                passed(EXPERTS, "sums by node", ranks=8, per_node=4),
            ],
            [("all_gather", 8, 4, 8, 8, "hierarchical")],
        ),
        *(
            ([passed(PLANS, "all_gather", ranks=8, per_node=4, us=FAST, ran="hierarchical"), by_node], [])
            for by_node in (
                passed(EXPERTS, "sums by node", ranks=8, per_node=4, wrong=1),
                passed(EXPERTS, "sums by node", ranks=4, per_node=4),
            )
        ),
        ([passed(PLANS, "barrier", 4, FAST)], [("barrier", 2, 2, 0, ANY_SIZE, "direct")]),
        ([passed(PLANS, "barrier", 4, SLOW)], []),
        ([passed(EXPERTS, "experts", 96, FAST, ran="direct, ring")], [("dispatch", 2, 2, 96, 96, "")]),
        ([passed(EXPERTS, f"experts, {us}", 96, us) for us in (FAST, SLOW)], []),
        ([passed(PLANS, "all_gather", 8, FAST, dtype=dtype, ran=dtype) for dtype in ("ring", "bruck")], []),
        ([passed(SLICES, "ragged_all_to_all", 96, FAST)], [("all_to_all_v", 2, 2, 96, 96, "")]),
        ([passed(PLANS, "psum", 8, FAST, ran=ran) for ran in ("", "xla", "direct, ring")], []),
        ([passed(PLANS, "psum_scatter", 8, FAST), passed(TYPES, "psum_scatter", wrong=1)], []),
        ([TYPED, passed(PLANS, "psum", 8, FAST), passed(TYPES, "pmin", wrong=1)], []),
        ([TYPED, passed(PLANS, "psum", 8, FAST), passed(PLANS, "psum", 64, FAST, wrong=1)], []),
        ([passed(PLANS, "all_gather", 8, FAST), passed(PROGRAMS, "loop", wrong=1)], []),
        (
            [passed(PLANS, "all_gather", 8, FAST), passed(EXPERTS, "experts", wrong=1)],
            [("all_gather", 2, 2, 8, 8, "direct")],
        ),
    ],
)
def test_only_what_won_is_the_default(rows, expected):
    found = _selftest_record.ranges(rows)
    names = ("collective", "num_ranks", "ranks_per_node", "min_bytes", "max_bytes", "algorithm")
    assert list(dict.fromkeys(tuple(entry[name] for name in names) for entry in found)) == expected
    assert {entry["dtype"] for entry in found} <= {"float32", "bfloat16"}


def test_types_of_sums():
    """Types that were timed by their own times, others up to the size at which their values were right."""
    rows = [
        passed(TYPES, "psum", 4096, dtype="float32,bfloat16,float16"),
        *(passed(PLANS, "psum", size, FAST) for size in (8, 1 << 20)),
        *(passed(PLANS, "psum", size, us, dtype="bfloat16") for size, us in ((8, SLOW), (1 << 20, FAST))),
    ]
    rows.append(passed(PLANS, "psum", 8, FAST, ranks=4, per_node=4))  # another group, in which one type was timed
    names = ("num_ranks", "dtype", "min_bytes", "max_bytes")
    assert sorted(tuple(entry[name] for name in names) for entry in _selftest_record.ranges(rows)) == [
        (2, "bfloat16", 1 << 20, 1 << 20),
        (2, "float16", 8, 4096),
        (2, "float32", 8, 1 << 20),
        *((4, dtype, 8, 8) for dtype in ("bfloat16", "float16", "float32")),
    ]


def test_sums_are_timed_in_two_types_on_gpus(monkeypatch):
    """Short calls in chains; their times are those of one call."""
    (group, _), *_ = selftest._groups(jax.devices(), [8])
    found = list(selftest.tests(group, 8, "gpu", (1024, 1 << 20), ["psum", "all_gather"]))
    timed = [(row, fill) for row, fill in found if row.feature == PLANS]
    types = [("psum", "float32"), ("psum", "bfloat16"), ("all_gather", "float32")]
    assert [(row.op, row.dtype) for row, _ in timed] == types * 2
    times = {"ours": timing.Times(np.array([16.0])), "theirs": timing.Times(np.array([24.0]))}
    monkeypatch.setattr(timing, "alternate", lambda *_, **__: times)
    row, fill = timed[0]
    fill()
    assert (row.wrong, row.jaxcomm_us, row.xla_us) == (0, 2, 3)


@pytest.mark.parametrize("feature", [feature for feature in plan.FEATURES if feature != "multimem"])
def test_the_program_of_a_feature(feature, monkeypatch):
    """Its values on CPUs; on GPUs, kernels of that feature run all its calls."""
    (group, _), *_ = selftest._groups(jax.devices(), [8])
    row, fill = next(test for test in selftest.tests(group, 8, "gpu", (1024,), []) if test[0].feature == feature)
    assert selftest._fill(row, fill) == f"{feature} was not tested: with these settings, other kernels run these calls"
    assert row.wrong == 0
    right = jaxcomm.all_gather if feature != "ll_two_shot" else jaxcomm.psum
    monkeypatch.setattr(jaxcomm, right.__name__, lambda *args, **more: right(*args, **more) + 1)
    fill()
    assert row.wrong > 0


@pytest.mark.parametrize("feature", plan.FEATURES)
def test_the_calls_of_a_feature_run_on_its_kernels(feature, mesh):
    size = selftest.STAGED_BYTES // 4 if feature == "staging" else 32 * 8
    program = on_ranks(lambda x: selftest.by_feature(jaxcomm, x, ("node", "gpu"), feature), mesh)
    with _request.resolutions() as calls:
        jax.jit(program).trace(jax.ShapeDtypeStruct((8, size), "float32")).lower(lowering_platforms=("cuda",))
    assert {found.feature for _, found in calls} == {feature}


def test_features_that_passed(monkeypatch):
    monkeypatch.setattr(_selftest_record, "key", lambda: GPU_KEY)
    rows = [passed(feature, feature) for feature in plan.FEATURES if feature != "staging"]
    rows += [passed("ll", "ll", wrong=1, ranks=4, per_node=4), passed(PLANS, "psum", 1 << 28, FAST)]
    _selftest_record.save(GPU_KEY, [*rows, passed(GRAPHS, "graphs")])
    assert _selftest_record.passed() == ["steps", "ll_two_shot", "multimem"]

    def found(*rows):
        forget()
        _selftest_record.path().unlink(missing_ok=True)
        _selftest_record.save(GPU_KEY, rows)
        return _selftest_record.measured_one_exchange(), _selftest_record.passed_between_nodes("dispatch")

    between = passed(EXPERTS, "experts", 96, SLOW, ranks=4)
    assert found() == (False, False)
    assert found(passed(EXPERTS, "experts", 96, FAST)) == (False, False)
    assert found(passed(ONE_EXCHANGE, ONE_EXCHANGE, 8, SLOW), between) == (False, True)
    rows = passed(ONE_EXCHANGE, ONE_EXCHANGE, 8, FAST), dataclasses.replace(between, wrong=1)
    assert found(*rows) == (False, False)  # not in CUDA graphs, where XLA would run it
    between_hosts = passed(GRAPHS, "graphs", wrong=1, ranks=4)  # whose calls stay out of graphs
    assert found(*rows, passed(GRAPHS, "graphs"), between_hosts) == (True, False)


@pytest.mark.parametrize("collective", ["all_reduce", "dispatch"])
def test_features_between_nodes(collective):
    """Plans and the kernels of experts put over the network by code of their own."""
    own, other = passed(EXPERTS, "experts", ranks=4), passed(PLANS, "psum", ranks=4)
    if collective == "all_reduce":
        own, other = other, own
    in_a_node = dataclasses.replace(own, ranks_per_node=4)
    rows = [own], [own, dataclasses.replace(other, wrong=1)], [other, in_a_node]
    rows += ([own, dataclasses.replace(own, error="no")],)
    found = [_selftest_record.put_between_nodes(each, collective) for each in rows]
    assert found == [True, True, False, False]


def test_the_default_on_gpus(monkeypatch, mesh, caplog):
    """XLA's own collective, except for calls that won; one line says how to change that."""
    _lowering._log.cache_clear()
    monkeypatch.setattr(_selftest_record, "key", lambda: GPU_KEY)
    monkeypatch.setattr(_lowering, "config", _config.Config)

    def by_jaxcomm(op, count, dtype=np.float32):
        jax.clear_caches()
        f = jax.jit(on_ranks(lambda x: getattr(OURS, op)(x, "gpu"), mesh))
        text = f.trace(np.zeros((8, count), dtype)).lower(lowering_platforms=("cuda",)).as_text()
        return "in no graph" if "@jaxcomm_all_reduce_eager" in text else "custom_call @jaxcomm" in text

    with caplog.at_level(logging.WARNING, "jaxcomm"):
        assert not by_jaxcomm("all_gather", 16) and not by_jaxcomm("psum", 16)
    assert len(caplog.messages) == 1 and "`python -m jaxcomm.selftest`" in caplog.text and "=plans" in caplog.text
    four = {"ranks": 4, "per_node": 4}
    forget()
    won = [passed(PLANS, "psum", size, us, **four, ran="ll") for size, us in ((4, FAST), (256, FAST), (4096, SLOW))]
    _selftest_record.save(GPU_KEY, [TYPED, *won])
    assert not by_jaxcomm("psum", 64)  # its kernels have not passed
    _selftest_record.save(GPU_KEY, [passed("ll", "ll")])
    forget()
    assert by_jaxcomm("psum", 64) == "in no graph"  # not tested
    monkeypatch.setattr(_selftest_record, "passed_in_graphs", lambda: True)
    assert by_jaxcomm("psum", 64) is True and not by_jaxcomm("psum", 65) and not by_jaxcomm("all_gather", 64)
    assert not by_jaxcomm("psum", 64, np.int32)  # a type that was not tested
    _lowering.use_plans()
    assert by_jaxcomm("all_gather", 64) and by_jaxcomm("psum", 64, np.int32)
    jax.clear_caches()
