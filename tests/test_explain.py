"""explain, algorithms and topology: their answers must match execution."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import _config, _lowering, _selftest_record
from jaxcomm._core import plan
from jaxcomm._request import NATIVE


def operand(count, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((count,), dtype)


B = 64 * 3 * 4  # bytes of an operand, among 8 ranks
BYTES = {  # of the operand and the result of a rank, and what a rank moves between ranks if all do it directly
    "all_to_all": (B, B, 7 * B // 8),
    "ragged_all_to_all": (B, B, 7 * B // 8),
    "all_gather": (B, 8 * B, 7 * B),
    "psum": (B, B, 2 * 7 * B // 8),
    "pmean": (B, B, 2 * 7 * B // 8),
    "pmax": (B, B, 2 * 7 * B // 8),
    "pmin": (B, B, 2 * 7 * B // 8),
    "psum_scatter": (B, B // 8, 7 * B // 8),
    "ppermute": (B, B, B),
    "pbroadcast": (B, B, 7 * B),
    "barrier": (0, 0, 0),
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes_of_every_op(op):
    for dtype, factor in ((jnp.float32, 1), (jnp.int8, 0.25), (jnp.complex128, 4)):
        if factor == 4 and op in ("pmax", "pmin"):
            continue  # complex numbers have no order
        direct = jaxcomm.explain(op, jax.ShapeDtypeStruct((64, 3), dtype), 8, algorithm="direct")
        assert (direct.num_nodes, direct.ranks_per_node) == (1, 8)
        found = direct.input_bytes, direct.output_bytes, direct.bytes["node"]
        assert found == tuple(factor * value for value in BYTES[op])
        assert direct.signals == {"self": 0, "node": 7 if op == "barrier" else 0, "network": 0}
    assert jaxcomm.explain("psum", operand(64, bool), 8).input_bytes == 4 * 64  # as int32
    assert f"{direct.op} over 1 node(s) of 8 rank(s): {found[0]} -> {found[1]} bytes per rank" in str(direct)
    assert f"predicted {direct.predicted_time_s * 1e6:.1f} us" in str(direct)


def test_steps_are_those_of_the_arguments():
    to = jaxcomm.explain("ppermute", operand(64), 4, perm=[(0, 2), (3, 1)])
    assert "get 1.output[0] = 3.input[0] x64" in to.steps_text(1)
    assert "get 2.output[0] = 0.input[0] x64" in to.steps_text(2)
    assert "zero 0.output[0] x64" in to.steps_text(0)
    shift = jaxcomm.explain("ppermute", operand(64), 4)
    assert "get 0.output[0] = 3.input[0] x64" in shift.steps_text(0)
    root = jaxcomm.explain("pbroadcast", operand(64), 4, source=2, algorithm="direct")
    puts = [root.steps_text(rank).count("2.input") for rank in range(4)]
    assert puts[2] > 0 and all("0.input" not in root.steps_text(rank) for rank in range(4))


def on_gpus(op, count, axis_sizes, **more):
    return jaxcomm.explain(op, operand(count), axis_sizes, platform="cuda", **more)


def test_small_blocks_on_gpus_by_hand():
    """Seven messages of 4000 bytes, and as many bytes of flags."""
    small = on_gpus("psum", 1000, 8)
    assert (small.algorithm, small.protocol, small.sms) == ("ll", "ll", 1)
    assert (small.messages["node"], small.bytes["node"], small.bytes["network"]) == (7, 2 * 7 * 4000, 0)
    by_hand = 2.2e-6 + 7 * (0.03e-6 + 4000 / 175e9) + 1.5e-6
    assert small.predicted_time_s == pytest.approx(by_hand)
    given = on_gpus("psum", 1000, 8, links=[jaxcomm.Link("ll", overhead_s=1e-6, latency_s=4e-6, bytes_per_s=1e9)])
    assert given.predicted_time_s == pytest.approx(2.2e-6 + 7 * (1e-6 + 4000 / 1e9) + 4e-6)
    assert "LL messages, 1 SM(s)" in str(small)
    assert "Parameters are not measured with jaxcomm" in str(small)
    assert "  launch 2.200 us, synchronization " in str(small) and small.launch_s != small.sync_overhead_s
    assert f"synchronization {small.sync_overhead_s * 1e6:.3f} us\n" in str(small)
    # Slices of 64 KiB, two shots, in slots of 8 channels.
    twice = on_gpus("psum", 8 << 14, 8, algorithm="ll_two_shot")
    assert (twice.protocol, twice.sms, twice.bytes["node"]) == ("ll_two_shot", 8, 2 * 14 * 65536)


def test_steps_on_gpus_by_hand():
    """A block of 4 MiB, split among 32 thread blocks with 1/32 of the bandwidth each. Short moves run at once."""
    walk = on_gpus("all_gather", 1 << 20, 8, algorithm="direct")
    assert (walk.protocol, walk.sms) == ("steps", 32)
    assert (walk.messages["node"], walk.bytes["node"]) == (7 * 32, 7 * (4 << 20))
    part = (4 << 20) / 32
    by_hand = 2.2e-6 + 5e-6 + 0.5e-6 + part / (1.5e12 / 32) + 7 * part / (350e9 / 32)
    assert walk.predicted_time_s == pytest.approx(by_hand)
    links = [jaxcomm.Link("node", 0.5e-6, 1e-6, 700e9)]  # the same, but twice as fast
    fast = on_gpus("all_gather", 1 << 20, 8, algorithm="direct", links=links)
    assert fast.predicted_time_s == pytest.approx(by_hand - 7 * part / (700e9 / 32))
    for names in (("ll", "one_shot"), ("ll_two_shot", "direct")):  # too large for LL
        assert len({on_gpus("psum", 1 << 20, 8, algorithm=name, links=links).predicted_time_s for name in names}) == 1
    assert on_gpus("all_gather", 1 << 20, 8, algorithm="direct", max_sms=4).sms == 4
    assert on_gpus("all_gather", 1 << 20, 8, algorithm="direct", max_sms=1000).sms == 32  # JAXCOMM_MAX_SMS


def test_a_staging_ring_on_gpus_by_hand():
    """1 GiB in chunks of 32 KiB on each of 32 thread blocks, of which the first two are copied before any transfer.

    Each later iteration has an overhead for its moves and one for its signals; the last two run at once.
    """
    part, chunk, node, own = 1 << 27, 32 << 15, 350e9, 1.5e12
    first = 2 * (0.3e-6 + 7 * chunk / own + 0.5e-6)
    others = 126 * (0.5e-6 + 7 * chunk / node + 0.5e-6) + 0.5e-6 + 2 * 7 * chunk / node
    staged = on_gpus("all_to_all", 1 << 28, 8)
    assert (staged.protocol, staged.sms) == ("steps", 32)
    assert staged.predicted_time_s == pytest.approx(7.2e-6 + first + others + 1e-6)
    in_place = on_gpus("all_to_all", 1 << 28, 8, symmetric_buffers=True)
    assert in_place.predicted_time_s == pytest.approx(7.2e-6 + 0.3e-6 + 7 * 0.5e-6 + part / own + 7 * part / node)
    assert (in_place.bytes["self"], staged.bytes["self"]) == (part, 8 * part)
    small, copied = (on_gpus("all_to_all", 1 << 23, 8, symmetric_buffers=on).predicted_time_s for on in (True, False))
    assert copied == pytest.approx(small + (1 << 25) / own)  # operands of the size of the ring are copied whole


COMBINED = ["psum", "pmax", "psum_scatter", "all_gather", "ppermute"]  # XLA's passes combine these on GPUs


def test_what_runs_by_default_and_what_is_lost(monkeypatch):
    monkeypatch.setattr(_lowering, "config", _config.Config)  # without the setting of the tests
    starts = ("psum_start", "psum_scatter_start", "all_to_all_start")
    for op in (*COMBINED, "all_to_all", "pbroadcast", "ragged_all_to_all", *starts):
        found = on_gpus(op, 4096, 8)
        assert found.default == "xla: jaxcomm's collectives are not measured on these GPUs with these versions"
        assert ("overlap" in found.lost) == (not op.endswith("_start"))
        assert ("combination" in found.lost) == (op.removesuffix("_start") in COMBINED)
        assert ("lost " in str(found)) == bool(found.lost)
    assert on_gpus("barrier", 0, 8).lost == ""
    row = {"collective": "all_reduce", "dtype": "float32", "num_ranks": 8, "ranks_per_node": 8}
    measured = [plan.Measured(**row, min_bytes=8, max_bytes=1 << 20, algorithm="ll")]
    monkeypatch.setattr(_selftest_record, "measured", lambda: measured)
    monkeypatch.setattr(_selftest_record, "measured_one_exchange", lambda: False)
    assert on_gpus("psum", 4096, 8).default == 'xla: the self-test has not passed "ll" on these GPUs'
    monkeypatch.setattr(_selftest_record, "passed", lambda: ["ll"])
    default = "ll: measured as faster than XLA's own collective on these GPUs for operands of 8 to 1048576 bytes"
    assert on_gpus("psum", 4096, 8).default == default
    for op, count in (("psum", 1 << 20), ("psum_start", 4096), ("all_gather", 4096)):
        assert on_gpus(op, count, 8).default.startswith("xla: ")


def test_candidates_inside_a_node_of_gpus():
    """A rank reaches every other at full bandwidth: no plan for networks is a candidate, but each can be asked for."""
    for op, name in (("psum", "ring"), ("psum", "tree"), ("all_gather", "bruck"), ("all_to_all", "pairwise")):
        for count in (8, 1 << 14, 1 << 22):
            assert f"{name} " not in on_gpus(op, count, 8).reason
            assert f" {name} " in on_gpus(op, count, 8, ranks_per_node=1).reason
        assert on_gpus(op, 1 << 14, 8, algorithm=name).algorithm == name


def test_less_than_a_byte_for_each_rank():
    """Lists of four bytes among eight ranks: the plan has moves without bytes."""
    found = jaxcomm.explain("ragged_all_to_all", jax.ShapeDtypeStruct((4,), np.int8), 8, platform="cuda")
    assert 0 < found.predicted_time_s < 1e-3
    rows = jax.ShapeDtypeStruct((8, 0), np.float32)  # and between hosts rows without any
    options = {"platform": "cuda", "ranks_per_node": 8, "num_experts": 64, "choices": 8}
    assert 0 < jaxcomm.explain("moe.combine", rows, 32, **options).predicted_time_s < 1e-3


def test_ragged_exchanges_on_gpus_by_hand():
    """Slices of 1 MiB to each of 8 ranks, split among 31 thread blocks; the result is copied out of the arena."""
    found = on_gpus("ragged_all_to_all", 8 << 18, 8)
    assert (found.algorithm, found.protocol, found.sms) == ("direct", "steps", 31)
    assert (found.messages["node"], found.bytes["node"]) == (7 * 31, 7 << 20)
    part = -(-(1 << 20) // (31 * 128)) * 128  # kGrainBytes
    by_hand = 2.2e-6 + 5e-6 + 0.5e-6 + 8 * part / (1.5e12 / 31) + 7 * part / (350e9 / 31)
    assert found.predicted_time_s == pytest.approx(by_hand)
    symmetric = on_gpus("ragged_all_to_all", 8 << 18, 8, symmetric_buffers=True)
    assert symmetric.predicted_time_s == found.predicted_time_s and symmetric.bytes == found.bytes
    with pytest.raises(ValueError, match=r"algorithm 'xla' runs .between nodes, slices travel by XLA's own ragged_all"):
        on_gpus("ragged_all_to_all", 64, 8, ranks_per_node=4)
    with pytest.raises(ValueError, match="GPUs have algorithm 'direct' for groups inside a node"):
        on_gpus("ragged_all_to_all", 64, 8, algorithm="pairwise")


def test_between_nodes_of_gpus_by_hand():
    """One message over the network, then its signal."""
    put = on_gpus("ppermute", 1024, 2, ranks_per_node=1)
    assert (put.num_nodes, put.messages["network"], put.bytes["network"]) == (2, 1, 4096)
    assert put.predicted_time_s == pytest.approx(2.2e-6 + 5e-6 + 1e-6 + 4096 / 48e9 + 7e-6)
    # Two nodes of four, blocks of 64 KiB on four channels.
    rail = on_gpus("all_to_all", 8 << 14, (2, 4))
    assert (rail.algorithm, rail.sms) == ("hierarchical", 4)
    assert (rail.messages["network"], rail.bytes["network"]) == (4, 4 * 65536)
    assert (rail.messages["node"], rail.bytes["node"], rail.signals["node"]) == (6 * 4, 6 * 65536, 3 * 4)
    assert rail.scratch_bytes == 4 * 65536  # of all channels
    root = on_gpus("pbroadcast", 1 << 20, 8, ranks_per_node=1, source=3, algorithm="direct")
    assert root.bytes["network"] == 7 * (4 << 20)
    for algorithm in (None, "pairwise"):
        with pytest.raises(ValueError, match="the call needs GIN, which NCCL does not have here; pass algorithm="):
            on_gpus("all_to_all", 8 << 14, (2, 4), gin=False, algorithm=algorithm)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_parameters_as_arguments(platform):
    """They change the prediction, not the selection."""
    arguments = {"platform": platform, "ranks_per_node": 1}
    if platform == "cpu":
        arguments["scope"] = "network"
    asked = jaxcomm.explain("ppermute", operand(1024), 2, **arguments)
    network = dataclasses.replace(
        next(link for link in asked.links if link.name == "network"),
        overhead_s=2e-6, latency_s=10e-6, bytes_per_s=96e9,
    )  # fmt: skip
    given = jaxcomm.explain("ppermute", operand(1024), 2, links=[network], **arguments)
    start = given.launch_s + given.sync_overhead_s
    assert given.predicted_time_s == pytest.approx(start + 2e-6 + 4096 / 96e9 + 10e-6, rel=1e-9)
    assert network in given.links
    assert (given.algorithm, given.reason, given.messages) == (asked.algorithm, asked.reason, asked.messages)
    assert (given.sms > 0) == (platform == "cuda")


MANY = ("all_to_all", "psum", "ppermute", "barrier")
OTHERS = sorted(NATIVE.keys() - {*MANY, "ragged_all_to_all"})  # which is XLA's collective between nodes


@pytest.mark.parametrize("op", [*MANY, *(pytest.param(op, marks=pytest.mark.full) for op in OTHERS)])
def test_100000_gpus(op):
    """Takes about one second of processor time, so that users can experiment."""
    began = time.process_time()
    many = on_gpus(op, 3_200_000, 100_000)
    assert time.process_time() - began < 8
    assert (many.num_nodes, many.ranks_per_node) == (12500, 8) and "assumed   hosts of 8 GPUs" in str(many)
    assert on_gpus(op, 3_200_000, (12500, 8)) == dataclasses.replace(many, assumed="")
    assert 0 < many.predicted_time_s < 100
    if op == "all_to_all":  # G - 1 messages of L blocks of 128 bytes
        assert (many.messages["network"], many.bytes["network"]) == (12499, 12499 * 8 * 128)
        assert (many.messages["node"], many.bytes["node"]) == (12500 * 7, 12500 * 7 * 128)
    if op == "ppermute":
        assert many.bytes["network"] == 12_800_000


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_psum_scatter"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_collective_matmul_is_its_transfers(op, platform):
    collective, parts = ("all_gather", 1) if op == "all_gather_matmul" else ("psum_scatter", 8)
    x = operand(1 << 20)
    whole = jaxcomm.explain(collective, x, (2, 4), platform=platform)
    one = jaxcomm.explain("ppermute", operand((1 << 20) // parts), (2, 4), platform=platform)
    default = jaxcomm.explain(op, x, (2, 4), platform=platform)
    reason = f"default; {collective} by {whole.algorithm}: {whole.reason}"
    assert default == dataclasses.replace(whole, op=op, algorithm="unfused", reason=reason)
    assert default.steps_text(3) == whole.steps_text(3)
    asked = jaxcomm.explain(op, x, (2, 4), algorithm="ring", platform=platform)
    reason = "asked for; 7 ppermute, one after the other"
    expected = {"op": op, "algorithm": "ring", "reason": reason, "steps": 7 * one.steps}
    expected |= {"input_bytes": whole.input_bytes, "output_bytes": whole.output_bytes}
    for name in ("messages", "bytes", "signals"):
        expected[name] = {link: 7 * count for link, count in getattr(one, name).items()}
    assert asked == dataclasses.replace(one, **expected, predicted_time_s=7 * one.predicted_time_s)
    assert asked.bytes["network"] > 0
    assert asked.steps_text(3) and f"{op} over 2 node(s) of 4 rank(s)" in str(asked)
    if platform == "cpu":  # the default of a call
        chosen = "ring" if op == "all_gather_matmul" else "unfused"
        assert jaxcomm.explain(op, x, 8, scope="node").algorithm == chosen
    with pytest.raises(ValueError, match=f"{op}: unknown algorithm 'tree'; pass one of unfused, ring"):
        jaxcomm.explain(op, x, 8, algorithm="tree")


def test_large_nodes_of_gpus():
    """A reduction of 20,000 operands is simulated for a sample of ranks only: 3 s instead of 13 on an idle machine."""
    began = time.process_time()
    assert on_gpus("psum", 1 << 20, 20_000, ranks_per_node=20_000).num_nodes == 1
    assert time.process_time() - began < 12
    shapes = [on_gpus("psum", 64, sizes).num_nodes for sizes in (8, 16, (16, 1), (1, 16), (2, 72))]
    assert shapes == [1, 2, 2, 2, 2]
    with pytest.raises(ValueError, match="psum: 12 ranks cannot be split into hosts of 8: pass ranks_per_node"):
        on_gpus("psum", 64, 12)


@pytest.mark.parametrize(
    ("op", "x", "sizes", "more", "message"),
    [
        ("allreduce", 8, 8, {}, "op must be one of all_to_all, .*psum_start, .*reshard, all_gather_matmul, .* got 'al"),
        ("all_to_all", 9, 8, {}, "all_to_all: 9 elements cannot be split into 8"),
        ("psum", 8, 8, {"algorithm": "fast"}, "psum: unknown algorithm 'fast'; pass one of direct"),
        ("psum_scatter", 6, 6, {"algorithm": "recursive_halving"}, "psum_scatter: .*recursive_halving.* power of two"),
        ("psum", 8, (2, 0), {}, "psum: axis_sizes must be positive"),
        ("psum", 8, "8", {}, "psum: axis_sizes must be an integer or a sequence of them, got '8'"),
        ("psum", (8,), 8, {}, r"psum: x must be an array or a jax.ShapeDtypeStruct, got \(8,\)"),
        ("psum", 8, 8, {"scope": "moon"}, "scope: got .*, expected one of process, node, network"),
        ("psum", 8, 8, {"ranks_per_node": 3}, "8 ranks cannot be split into nodes of 3"),
        ("psum", 8, 8, {"platform": "gpu"}, "psum: platform must be 'cpu' or 'cuda', got 'gpu'"),
        ("psum", 8, 8, {"platform": "cuda", "scope": "node"}, "psum: scope is for CPU devices only"),
        (
            "psum",
            8,
            8,
            {"platform": "cuda", "links": [jaxcomm.Link("wire", 0, 0, 1)]},
            "among self, node, network, ll, got 'wire'",
        ),
        *(
            ("psum", 8, 8, {"links": [jaxcomm.Link("node", *wrong)]}, "times of at least 0 and a bandwidth above 0")
            for wrong in ((0, 0, 0), (-1e-9, 0, 1), (0, -1e-9, 1))
        ),
        ("pbroadcast", 8, 8, {"source": 8}, "pbroadcast: source must be a rank from 0 to 7, got 8"),
        ("ppermute", 8, 8, {"perm": [(0, 9)]}, r"ppermute: perm must have destinations from 0 to 7, got \[9\]"),
        ("moe.combine", 8, 8, {}, "moe.combine is explained for GPUs only: pass platform='cuda'"),
        ("pmax", operand(8, jnp.complex64), 8, {}, "pmax: x has element type complex64, which has no order"),
    ],
)
def test_bad_arguments(op, x, sizes, more, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jaxcomm.explain(op, operand(x) if isinstance(x, int) else x, sizes, **more)


def test_the_text_of_a_link():
    link = jaxcomm.Link("wire", overhead_s=1.5e-6, latency_s=20e-6, bytes_per_s=3e9)
    assert str(link).split() == ["wire", "1.500", "us", "a", "step", "20.000", "us", "latency", "3.000", "GB/s"]


def test_mesh_keeps_the_order_of_devices():
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jaxcomm.make_mesh((2, 3), ("node", "gpu"), devices=jax.devices()[:0:-1], axis_types=types)
    assert (mesh.axis_names, mesh.axis_types) == (("node", "gpu"), types)
    assert mesh.devices.tolist() == np.array(jax.devices()[1:7]).reshape(2, 3).tolist()
    with pytest.raises(ValueError, match="need 9 devices, got 8"):
        jaxcomm.make_mesh((3, 3), ("node", "gpu"))


def test_the_text_has_the_numbers_of_each_link():
    found = jaxcomm.explain("psum", jax.ShapeDtypeStruct((1 << 16,), "float32"), (2, 4), algorithm="hierarchical")
    assert found.messages != found.signals
    for name, messages in found.messages.items():
        numbers = rf"{messages} messages +{found.bytes[name]} bytes +{found.signals[name]} signals"
        assert re.search(rf"^  {name} +{numbers}$", str(found), re.MULTILINE), name
