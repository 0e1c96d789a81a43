"""One decision: lowering, explain(), the simulator, info() and the self-test have the same Resolution of a call.

tests/cpu/test_planner.cc and tests/cuda/test_call.cc hold the executors to it.
"""

import contextlib
import inspect
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OURS, on_ranks

import jaxcomm
from jaxcomm import _config, _explain, _lowering, _request, _selftest_record
from jaxcomm._core import plan
from jaxcomm._request import NATIVE, ROWS
from jaxcomm.simulate import Cluster, Level, collectives

# Arguments besides the axis, for an operand of (16, 3) on 8 ranks, of the ops that have them.
VALUES = {
    "split_axis": 0, "concat_axis": 0, "scatter_dimension": 0, "tiled": True, "source": 3,
    "perm": [(r, (r + 1) % 8) for r in range(8)],
}  # fmt: skip
ARGUMENTS = {
    op: {name: VALUES[name] for name in inspect.signature(getattr(jaxcomm, op)).parameters if name in VALUES}
    for op in NATIVE
}
EXPLAINED = {op: {name: known[name] for name in ("source", "perm") if name in known} for op, known in ARGUMENTS.items()}
AXES = ("node", "gpu")
# A node of 8 GPUs, in which the simulator gets the machine of explain().
GPUS = Cluster("node", "GPU", (Level("nvlink", "switch", 8, 450e9),), channels=_config.config().max_sms)


def lowered(mesh, op, x, platform, **more):
    """What lowering resolves for a program with the op."""

    def call(x):
        if op == "ragged_all_to_all":
            places, sizes = 2 * np.arange(8), np.full(8, 2, np.int32)
            return OURS.ragged_all_to_all(x, x, places, sizes, places, sizes, axis_name=AXES, **more)
        if op.endswith("_start"):
            return getattr(OURS, op)(x, AXES, **ARGUMENTS.get(op.removesuffix("_start"), {}), **more).done()
        return getattr(OURS, op)(x, AXES, **ARGUMENTS.get(op, {}), **more)

    block = jax.ShapeDtypeStruct((8, *x.shape), x.dtype)
    with _request.resolutions() as found:
        jax.jit(on_ranks(call, mesh)).trace(block).lower(lowering_platforms=(platform,))
    return found[-1 if op == "ragged_all_to_all" else 0][1]


def measured(per_node, names=tuple(ROWS), algorithm="direct"):
    """A record in which one plan was faster for these collectives, of any size."""
    row = {"num_ranks": 8, "ranks_per_node": per_node, "min_bytes": 0, "max_bytes": _selftest_record.ANY_SIZE}
    row["algorithm"] = algorithm
    dtypes = ("float32", "uint8", "int8", "bfloat16", "uint16")
    return [plan.Measured(collective=name, dtype=dtype, **row) for name in names for dtype in dtypes]


def backend(op, algorithm, platform, setting, measured):
    """The rules in words: docs/guide/choosing.md."""
    if setting == "xla" or algorithm == "xla":
        return "xla"
    if algorithm == "xla_hierarchical":
        return "composition"
    if platform == "tpu":
        return "composition" if algorithm == "hierarchical" else "xla"
    if platform == "cuda" and algorithm is None and setting is None and (not measured or op.endswith("_start")):
        return "xla"
    return "rows" if platform == "cuda" and op == "ragged_all_to_all" else "plan"


def assert_same_call(made, told, what):
    """Arguments of plan.resolve. The lowering alone has strides and the reduction, and data of a barrier."""
    for name in made[1].keys() & told[1].keys() - ({"ranks_per_node", "algorithm"} if "cuda" in what else set()):
        assert np.array_equal(made[1][name], told[1][name]), f"{what}: {name}"
    assert made[0] == told[0] and (made[0] == "barrier" or made[2:] == told[2:]), what


def test_lowering_explain_and_the_simulator_agree(mesh, monkeypatch):
    draw = random.Random(20261124)
    machine = plan.gpu_machine()
    monkeypatch.setattr(collectives.sim, "machine_of", lambda cluster, ranks: machine)
    starts = [f"{op}_start" for op in ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast")]
    seen = dict.fromkeys(("xla", "composition", "plan", "rows", "error"), 0)
    calls, resolve = [], plan.resolve
    monkeypatch.setattr(plan, "resolve", lambda *given, **rows: calls.append(given[:5]) or resolve(*given, **rows))
    for _ in range(900):
        op = draw.choice([*NATIVE, *starts])
        platform = draw.choice(["cpu", "cpu", "cuda", "cuda", "tpu"])
        names = [*jaxcomm.algorithms(op), "xla", "xla_hierarchical"]
        algorithm = draw.choice([None, draw.choice(names)])
        setting = draw.choice([None, None, None, "xla", "plans"])
        tested = draw.random() < 0.7
        max_sms = draw.choice([None, None, 1, 5, 1000])
        x = jax.ShapeDtypeStruct((16, draw.choice([1, 3, 1000, 60_000])), draw.choice(["float32", "int8", "bfloat16"]))
        monkeypatch.setattr(_lowering, "config", lambda setting=setting: _config.Config(algorithm=setting))
        monkeypatch.setattr(_selftest_record, "measured", lambda tested=tested: measured(8) if tested else [])
        monkeypatch.setattr(_selftest_record, "passed", lambda: list(plan.FEATURES))
        monkeypatch.setattr(_selftest_record, "measured_one_exchange", lambda: False)
        what = f"{op} {x} {algorithm} {platform} {setting} {tested} {max_sms}"
        given = {"algorithm": algorithm, "max_sms": max_sms}
        shape = {"platform": platform, "ranks_per_node": 8} if platform == "cuda" else {}  # GPUs of one host
        given_to_explain = {**given, **EXPLAINED.get(op.removesuffix("_start"), {}), **shape}
        calls.clear()
        try:
            found = lowered(mesh, op, x, platform, **given)
        except (ValueError, NotImplementedError) as error:
            seen["error"] += 1
            assert op in str(error), what
            if platform != "tpu" and setting != "xla":
                with pytest.raises(ValueError):
                    jaxcomm.explain(op, x, (2, 4), **given_to_explain)
            continue
        seen[found.backend] += 1
        measured_so = tested and max_sms not in (1, 5)
        assert found.backend == backend(op, algorithm, platform, setting, measured_so), what
        if found.backend in ("xla", "composition"):
            assert found.algorithm == {"xla": "xla", "composition": "xla_hierarchical"}[found.backend], what
            if algorithm is not None and setting is None and platform != "tpu":
                with pytest.raises(ValueError, match="has no plan"):
                    jaxcomm.explain(op, x, (2, 4), **given_to_explain)
            continue
        if "needs other nodes" in found.reason:
            with pytest.raises(ValueError, match="needs several nodes"):
                jaxcomm.explain(op, x, (2, 4), **given_to_explain)
            continue
        if platform == "cuda" and algorithm is None and setting is None:  # the record names the plan
            assert found.reason.startswith("measured as faster than XLA's own collective on these GPUs"), what
            given["algorithm"] = algorithm = "direct"
        made, first = calls[-1 if op == "ragged_all_to_all" else 0], len(calls)
        told = jaxcomm.explain(op, x, (2, 4), **given_to_explain)
        assert_same_call(made, calls[first], what)
        assert (told.algorithm, told.reason, told.sms) == (found.algorithm, found.reason, found.num_channels), what
        assert told.protocol == (found.protocol if found.ll else "steps"), what
        request, same = found.request, told._request
        fields = ["collective", "num_nodes", "ranks_per_node", "block_count", "staged_count"]
        fields += ["chunk_count"] if op != "barrier" else []
        for field in fields:
            assert getattr(request, field) == getattr(same, field), f"{what}: {field}"
        if platform == "cuda" and not str(algorithm).startswith("multimem"):  # clusters have no NVLink SHARP
            source, perm = (EXPLAINED.get(op.removesuffix("_start"), {}).get(name) for name in ("source", "perm"))
            timed, _, _ = collectives.resolve(op, x, 8, GPUS, source=source or 0, perm=perm, **given)
            assert_same_call(made, calls[-1], what)
            names = ["backend", "algorithm", "num_channels"]
            assert [getattr(timed, name) for name in names] == [getattr(found, name) for name in names], what
            for field in fields:
                assert getattr(timed.request, field) == getattr(request, field), f"{what}: {field}"
            seen["simulated"] = seen.get("simulated", 0) + 1
    assert min(seen.values()) >= 4, seen


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("xla", "not measured on these GPUs with these versions")),
        ({"measured": measured(8)}, ("xla", "no measurement on these GPUs")),
        ({"measured": measured(4, algorithm="ring"), "passed": ["steps"]}, ("plan", "measured as faster")),
        ({"measured": measured(4), "passed": ["steps"]}, ("xla", "needs other nodes")),
        ({"measured": measured(4, algorithm="hierarchical"), "passed": ["steps"]}, ("xla", "has not been tested")),
        ({"setting": "plans"}, ("plan", "")),
        ({"setting": "plans", "algorithm": "hierarchical"}, ("plan", "asked for")),
        ({"algorithm": "hierarchical"}, ("composition", "GIN between nodes of these GPUs has not been tested")),
        ({"algorithm": "hierarchical", "tested_between_nodes": True}, ("plan", "asked for")),
        ({"algorithm": "ring"}, ("plan", "asked for")),
        ({"algorithm": "ll"}, ("plan", "asked for; needs other nodes")),  # NVLink may connect the hosts
        ({"found": True, "setting": "plans"}, "needs GIN, which NCCL does not have here"),
        ({"found": True, "setting": "plans", "gin": True}, ("plan", "")),
        ({"found": True, "gin": True, "algorithm": "ll"}, 'algorithm "ll" needs'),
    ],
)
def test_between_hosts_of_gpus(change, expected):
    """Two hosts of four GPUs: before the run, NCCL has not told how NVLink and GIN connect them."""
    change = dict(change)
    attributes = {"group_size": 8, "ranks_per_node": 8, "algorithm": change.pop("algorithm", "")}
    placement = plan.Placement(ranks_per_node=4, found=change.pop("found", False), gin=change.pop("gin", False))
    able = plan.Capabilities("cuda", max_channels=32, **change)
    arguments = ("all_reduce", attributes, "float32", 1 << 16, 1 << 16, placement, able)
    refused = isinstance(expected, str)
    with pytest.raises(ValueError, match=expected) if refused else contextlib.nullcontext():
        found = plan.resolve(*arguments)
        assert (found.backend, expected[1] in found.reason) == (expected[0], True), found.reason


# Shared memory of a thread block: 48 KiB. Inside a node: 16 KiB of moves and 4 bytes per expert. Between nodes: 12 KiB,
# the same, and 12 bytes per 64 choices.
@pytest.mark.parametrize(
    ("per_node", "choices", "experts", "algorithm", "fits"),
    [
        (8, 1 << 30, 8192, "", True),
        (8, 8, 8200, "", False),
        (8, 8, 8200, "hierarchical", False),
        (4, 131_072, 3064, "", True),
        (4, 131_072 + 64 * 16, 3064, "", False),
        (4, 131_072 + 64 * 16, 3064, "hierarchical", True),  # by name, a row is marked for each token
    ],
)
def test_limits_of_row_kernels(per_node, choices, experts, algorithm, fits):
    attributes = {"group_size": 8, "ranks_per_node": 8, "choices": 8, "num_experts": experts, "row_count": 4}
    attributes["algorithm"] = algorithm
    able = plan.Capabilities("cuda", setting="plans", tested_between_nodes=True, max_channels=32)
    where, count = plan.Placement(ranks_per_node=per_node, found=False), 4 * 131_072
    why = (
        f"{choices} choices of a rank, 8 per token, and {experts} experts exceed the shared memory of jaxcomm's kernels"
    )
    why += " between nodes" if per_node == 4 else ""
    refused = pytest.raises(ValueError, match=re.escape(why) + '; pass algorithm="xla"$')
    with refused if algorithm and not fits else contextlib.nullcontext():
        found = plan.resolve("dispatch", attributes, "float32", count, count, where, able, choices=choices)
        assert (found.backend, found.reason == why) == (("rows", False) if fits else ("xla", True))


def test_the_setting_limits_multiprocessors(mesh, monkeypatch):
    for module in (_lowering, _explain):
        monkeypatch.setattr(module, "config", lambda: _config.Config(algorithm="plans", max_sms=5))
    x = jax.ShapeDtypeStruct((16, 1 << 16), "float32")
    told = jaxcomm.explain("all_gather", x, 8, platform="cuda", algorithm="direct")
    assert lowered(mesh, "all_gather", x, "cuda", algorithm="direct").num_channels == told.sms == 5


def test_info_lists_what_runs(mesh):
    for call, text in jaxcomm.info().collectives.items():
        op, _, size = call.partition(" of ")
        count = int(size.removesuffix(" bytes") or 4) // 4
        told = jaxcomm.explain(op, jax.ShapeDtypeStruct((count,), "float32"), mesh.size)
        assert text == f"{told.algorithm}: {told.reason}", call


ABLE = {"setting": "plans", "tested_between_nodes": True, "max_channels": 32}


def on_gpus(collective, count, dtype="float32", *, able=ABLE, per_node=8, found=False, gin=False, **attributes):
    """What runs a call of 8 GPUs."""
    placement = plan.Placement(ranks_per_node=per_node, found=found, gin=gin)
    more = {"choices": attributes.get("choices", 0)} if collective in ("dispatch", "combine") else {}
    given = {"group_size": 8, "ranks_per_node": 8, **attributes}
    result = count * 8 if collective == "all_gather" else count // 8 if collective == "reduce_scatter" else count
    return plan.resolve(collective, given, dtype, count, result, placement, plan.Capabilities("cuda", **able), **more)


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "plan"),
        ({"count": 500}, "plan"),  # 1,000 bytes, the first of the range
        ({"count": 499}, "xla"),
        ({"count": 1000}, "plan"),
        ({"count": 1001}, "xla"),
        ({"dtype": "float32"}, "xla"),
        ({"group_size": 4}, "xla"),
        ({"per_node": 4}, "xla"),
        ({"asynchronous": 1}, "xla"),
        ({"plan": ""}, "xla"),  # of all_to_all_v and dispatch only
    ],
)
def test_a_record_holds_for_its_calls_only(change, backend):
    """The cost model has no "ring" among its candidates inside a node."""
    limits = {"min_bytes": 1000, "max_bytes": 2000}
    given = {"count": 600, "dtype": "bfloat16", **change}
    limits["algorithm"] = given.pop("plan", "ring")
    row = plan.Measured("all_reduce", "bfloat16", num_ranks=8, ranks_per_node=8, **limits)
    found = on_gpus("all_reduce", able={"measured": [row], "passed": plan.FEATURES, "max_channels": 32}, **given)
    assert (found.backend, found.algorithm) == (backend, "ring" if backend == "plan" else "xla")
    assert ("measured as faster" in found.reason) == (backend == "plan")
    assert ("no measurement on these GPUs" in found.reason) == (backend == "xla" and "asynchronous" not in change)


@pytest.mark.parametrize(
    ("feature", "collective", "count"),
    [
        ("steps", "all_gather", 1 << 16),
        ("staging", "all_gather", 1 << 26),
        ("ll", "all_gather", 256),
        ("ll_two_shot", "all_reduce", 1 << 16),
    ],
)
def test_a_record_holds_for_its_feature_only(feature, collective, count):
    """All sizes were measured as faster, and all other features have passed."""
    others = [name for name in plan.FEATURES if name != feature]
    for passed, backend in (([feature], "plan"), (others, "xla"), ([], "xla")):
        algorithm = feature if feature.startswith("ll") else "direct"
        able = {"measured": measured(8, algorithm=algorithm), "passed": passed, "max_channels": 32}
        found = on_gpus(collective, count, able=able)
        assert found.backend == backend, passed
        assert found.feature == (feature if backend == "plan" else "")
        assert backend == "plan" or f'the self-test has not passed "{feature}"' in found.reason
    # Who names an algorithm, or asks for all plans, needs no record.
    assert on_gpus(collective, count, able={"setting": "plans", "max_channels": 32}).feature == feature


@pytest.mark.parametrize(("max_sms", "backend"), [(0, "plan"), (32, "plan"), (1000, "plan"), (31, "xla"), (1, "xla")])
@pytest.mark.parametrize("collective", ["all_gather", "dispatch"])
def test_a_record_holds_for_all_multiprocessors_only(collective, max_sms, backend):
    able = {"measured": measured(8, algorithm="ll"), "passed": plan.FEATURES, "max_channels": 32}
    rows = {"row_count": 4, "choices": 2, "num_experts": 8} if collective == "dispatch" else {}
    found = on_gpus(collective, 1 << 12, able=able, max_sms=max_sms, **rows)
    assert found.backend == (backend if collective == "all_gather" or backend == "xla" else "rows")
    assert ("max_sms" in found.reason) == (backend == "xla")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_costs_do_not_choose_the_chunks_of_a_measured_plan(collective):
    guess, other = plan.gpu_machine(), plan.gpu_machine()
    other.links = [(name, 100 * overhead_s, speed, latency_s) for name, overhead_s, speed, latency_s in guess.links]
    for algorithm, _ in plan.algorithms(collective):
        for count, per_node in ((1 << 20, 8), (1 << 26, 8), (1 << 20, 4), (1 << 26, 4)):
            given = {"algorithm": algorithm, "per_node": per_node, "found": True, "gin": True}
            able = ({"machine": machine, "max_channels": 32} for machine in (guess, other))
            try:
                one, two = (on_gpus(collective, count, able=settings, **given).request for settings in able)
            except ValueError:
                continue  # needs other nodes
            assert (one.chunk_count, one.staged_count) == (two.chunk_count, two.staged_count), (algorithm, count)


@pytest.mark.parametrize("collective", ["dispatch", "combine"])
@pytest.mark.parametrize(("count", "backend"), [(8, "xla"), (32, "rows"), (64, "xla")])
def test_a_record_of_dispatch_counts_a_row_for_each_choice(collective, count, backend):
    """2 choices of one token of 8, 32 and 64 floats: 64, 256 and 512 bytes."""
    row = plan.Measured("dispatch", "int8", num_ranks=8, ranks_per_node=8, min_bytes=100, max_bytes=300, algorithm="")
    layer = {"choices": 2, "num_experts": 8, "row_count": count}
    found = on_gpus(collective, count, able={"measured": [row], "max_channels": 32}, **layer)
    why = "measured as faster than XLA's own collective on these GPUs; one kernel moves the rows inside a node"
    assert (found.backend, found.reason == why) == (backend, backend == "rows")


def test_channels_and_memory_of_gpus():
    """A large call uses all channels that it may; a started one leaves the others to computations.

    NVLink SHARP is used by name only.
    """
    able = {**ABLE, "multimem": True}
    assert "multimem" not in {on_gpus("all_reduce", 1 << exponent, able=able).feature for exponent in range(4, 28)}
    assert on_gpus("all_reduce", 64, able=able, algorithm="multimem").feature == "multimem"
    large = 1 << 26
    in_place = {**ABLE, "in_place": True}
    for asynchronous, max_sms, channels in (
        *((0, 0, 32), (0, 3, 3), (0, 64, 32)),
        *((1, 0, plan.ASYNCHRONOUS_CHANNELS), (1, 2, 2)),
    ):
        found = on_gpus("all_gather", large, asynchronous=asynchronous, max_sms=max_sms)
        assert (found.num_channels, found.machine.arena) == (channels, True)
    assert not on_gpus("all_gather", large, able=in_place).machine.arena
    assert on_gpus("all_gather", large, able=in_place, asynchronous=1).machine.arena
    assert on_gpus("all_to_all_v", large, able=in_place).machine.arena


@pytest.mark.parametrize(
    ("dtype", "weighted", "home", "adds"),
    [
        ("float32", 1, 0, True),
        ("bfloat16", 0, 1, True),
        ("float16", 1, 0, True),
        ("float64", 1, 1, True),
        ("uint64", 0, 0, True),
        ("int16", 0, 0, True),
        ("int32", 0, 1, True),
        ("int32", 1, 0, False),
        ("int8", 0, 0, False),
        ("complex64", 0, 0, False),
        ("complex64", 0, 1, True),
    ],
)
def test_who_adds_the_rows_of_a_token_on_cpus(dtype, weighted, home, adds):
    attributes = {"group_size": 8, "ranks_per_node": 4, "choices": 2, "num_experts": 8, "row_count": 4}
    attributes |= {"weighted": weighted, "home": home}
    able = plan.Capabilities("cpu", machine=plan.machine_of("network", 8, 4))
    where = plan.Placement("network", 4), able, 16
    found = plan.resolve("combine", attributes, dtype, 64, 64, *where)
    assert found.returns_choices is not adds
    own = plan.resolve("combine", {**attributes, "per_choice": 1}, dtype, 64, 64, *where, 0)  # lists without rows
    assert (own.returns_choices, own.algorithm, own.item_bytes) == (False, "direct", 0)
    assert found.item_bytes == 8 * jnp.dtype(dtype).itemsize  # of an even share of 64 elements
    # Only sums by node pass a node: "home" adds in the order of the choices.
    assert found.algorithm == ("hierarchical" if adds and not home else "direct")


SLICES, GIN = "all_to_all_v", "between nodes, the call needs GIN, which NCCL does not have here"
NVLINK = 'algorithm "direct" runs inside a node of GPUs, which NVLink connects; pass algorithm="xla"'


@pytest.mark.parametrize(
    ("collective", "change", "expected"),
    [
        ("dispatch", {}, ("rows", "the self-test has passed between nodes")),
        ("dispatch", {"tested": False}, ("xla", "the self-test has not passed between nodes of these GPUs")),
        ("dispatch", {"tested": False, "algorithm": "hierarchical"}, ("rows", "asked for")),
        ("dispatch", {"algorithm": "direct"}, ("xla", 'algorithm "direct" runs inside a node')),
        ("combine", {"algorithm": "hierarchical", "found": True, "gin": True}, ("rows", "asked for")),
        ("combine", {"algorithm": "hierarchical", "found": True}, GIN),
        ("combine", {"found": True, "gin": True}, f'{NVLINK}, and on_overflow="drop" to moe.route'),
        ("combine", {"per_node": 8}, ("rows", "one kernel moves the rows inside a node")),
        (
            "dispatch",
            {"per_node": 8, "algorithm": "hierarchical"},
            ("rows", 'inside a node, "hierarchical" is "direct"'),
        ),
        (SLICES, {}, ("xla", "between nodes, slices travel by XLA's own ragged_all_to_all")),
        (SLICES, {"algorithm": "direct"}, NVLINK),
        (SLICES, {"found": True}, NVLINK),
        (SLICES, {"per_node": 8}, ("rows", "one kernel moves the slices inside a node")),
    ],
)
def test_rows_between_nodes_of_gpus(collective, change, expected):
    given = {"choices": 2, "num_experts": 8, "row_count": 4, "per_node": 4, **change}
    given["able"] = {**ABLE, "tested_between_nodes": given.pop("tested", True)}
    refused = isinstance(expected, str)
    match = f"^{re.escape(expected)}$" if refused else ""
    with pytest.raises((ValueError, NotImplementedError), match=match) if refused else contextlib.nullcontext():
        found = on_gpus(collective, 64, **given)
        assert (found.backend, found.reason) == expected


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_who_adds_the_rows_of_a_token_on_gpus(dtype):
    """The kernel of a node adds floats, unless the program declares nodes and adds by them."""
    for per_choice, home, declared in itertools.product((0, 1), (0, 1), (4, 8)):
        layer = {"choices": 2, "num_experts": 8, "row_count": 4, "per_choice": per_choice, "home": home}
        found = on_gpus("combine", 64, dtype, ranks_per_node=declared, **layer)
        by_caller = dtype == "int32" or (declared == 4 and not home)
        assert found.returns_choices == (not per_choice and by_caller)


def test_limits_of_one_exchange_and_of_rings():
    """64 MiB: epochs, and two sets of 16-byte slots from 8 ranks: for ids in 63 channels, two for 8 bytes of a row."""
    able = plan.Capabilities("cuda", setting="plans", max_channels=8)
    for row_bytes, named, per_node, expected in (
        (252 * 128, True, 8, "asked for"),
        (252 * 128 + 1, True, 8, "the sizes exceed the limits of one exchange"),
        (16384, False, 8, "few rows"),
        (16385, False, 8, "a rank has more than 524288 bytes of rows"),
        (128, True, 4, "one exchange runs inside a node"),
    ):
        place = plan.Placement(ranks_per_node=per_node)
        one = expected in ("asked for", "few rows")
        assert plan.resolve_route_and_dispatch(8, 32, 8, 256, row_bytes, named, 0, place, able) == (one, expected)
    able = {setting: plan.Capabilities("cpu", setting=setting) for setting in ("", "xla")}
    for case in itertools.product(
        ("rows", "sums", "scatter"), (131_071, 131_072), ("process", "node", "network"), able
    ):
        product, block_bytes, scope, setting = case
        found = plan.resolve_collective_matmul(product, block_bytes, plan.Placement(scope), able[setting])
        assert found == ("ring" if case == ("rows", 131_072, "node", "") else "unfused")
    for count, channels in ((8192, 1), (8193, 2)):  # parts of 4096 and 4097 bytes
        assert on_gpus("all_reduce", count, algorithm="ll_two_shot").num_channels == channels
        assert on_gpus("all_reduce", 2 * count, algorithm="ll").ll == (count == 8192)  # up to 64 KiB
