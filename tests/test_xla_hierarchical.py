"""algorithm="xla_hierarchical": values, and the collectives in the program."""

import functools
import json
import math
import re

import jax
import numpy as np
import pytest
from harness import LAX, OURS, assert_same, on_ranks, run

import jaxcomm
from jaxcomm import _config, _lowering, _xla_hierarchical
from jaxcomm._processes import placement

NAME = "xla_hierarchical"
AXES = ("node", "gpu")
# Arguments on a block of (24, 3), and the collectives of XLA in their order: "node" or "rail", and its kind.
OPS = {
    "all_to_all": ({"split_axis": 0, "concat_axis": 1, "tiled": True}, "node all-to-all, rail all-to-all"),
    "all_gather": ({"axis": 1, "tiled": True}, "rail all-gather, node all-gather"),
    "psum_scatter": ({"scatter_dimension": 0, "tiled": True}, "node reduce-scatter, rail reduce-scatter"),
    "psum": ({}, "node reduce-scatter, rail all-reduce, node all-gather"),
    "pmean": ({}, "node reduce-scatter, rail all-reduce, node all-gather"),
    "pmax": ({}, "node all-to-all, rail all-reduce, node all-gather"),
    "pmin": ({}, "node all-to-all, rail all-reduce, node all-gather"),
    "pbroadcast": ({"source": 4}, "node all-to-all, rail all-to-all, rail all-gather, node all-gather"),
}


def results(library, x, axes, **more):
    """Values of all ops on integers that every type holds exactly. tests/ops/test_options_of_ops.py has derivatives."""
    more = {"algorithm": NAME, **more} if library is OURS else more
    ops = [op for op in OPS if op != "pbroadcast" or "axis_index_groups" not in more]
    return {op: getattr(library, op)(x, axis_name=axes, **OPS[op][0], **more) for op in ops}


@pytest.mark.parametrize("groups", [None, [[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 3, 1, 5], [0, 2, 6, 4]]], ids=str)
@pytest.mark.parametrize("axes", [("gpu",), AXES], ids=str)
def test_groups_on_nodes_that_the_placement_finds(mesh, line, rng, monkeypatch, axes, groups):
    monkeypatch.setattr(placement, "ranks_per_node_for_xla", lambda *_: 2)
    x = rng.integers(-3, 4, (8, 24, 5)).astype(np.float32)
    more = {} if groups is None else {"axis_index_groups": groups}
    assert collectives(lowered("psum", line, ("gpu",), **more), 2, groups) == OPS["psum"][1]
    monkeypatch.setattr(_xla_hierarchical, "_MIN_CHUNK_BYTES", 64)  # the values are those of uneven chunks

    def body(x):
        return [results(library, x, axes, **more) for library in (OURS, LAX)]

    got, want = run(body, line if len(axes) == 1 else mesh, x, check_vma=False)
    assert_same(got, want, bits=True)


def test_varying_types_and_special_values(mesh):
    """Data that only moves keeps its bits: NaN payloads and signed zeros."""
    x = np.resize(np.array([0x7FC12345, 0x80000000, 0xFF800001, 1], np.uint32), (8, 24, 3)).view(np.float32)

    def body(x):
        ops = {op: functools.partial(getattr(OURS, op), **OPS[op][0]) for op in ("all_to_all", "pbroadcast")}
        return [{op: f(x, AXES, algorithm=a) for op, f in ops.items()} for a in (NAME, "direct")]

    assert_same(*run(body, mesh, x), bits=True)
    ones = np.ones((8, 5), np.float32)
    gathered = run(lambda x: OURS.all_gather(x, AXES, to="invarying", algorithm=NAME), mesh, ones)
    assert_same(gathered, np.ones((8, 8, 5), np.float32))
    assert_same(run(lambda x: OURS.psum(x, AXES, algorithm=NAME), mesh, ones), 8 * ones)


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7,)], ids=str)
def test_sizes_that_no_rank_divides(mesh, rng, shape):
    x = rng.integers(-3, 4, (8, *shape)).astype(np.int32)

    def body(x):
        sums = [getattr(OURS, op)(x, AXES, algorithm=NAME) for op in ("psum", "pmin")]
        return [*sums, OURS.pbroadcast(x, AXES, 5, algorithm=NAME)]

    got = run(body, mesh, x)
    for y, want in zip(got, (x.sum(0), x.min(0), x[5]), strict=True):
        np.testing.assert_array_equal(y, np.broadcast_to(want, x.shape))


def lowered(op, mesh, axes, platform="cpu", elements=72, **more):
    """The program of one call on a block of (24, 3), or with another number of columns."""
    f = on_ranks(lambda x: getattr(OURS, op)(x, axes, algorithm=NAME, **OPS[op][0], **more), mesh, check_vma=False)
    x = jax.ShapeDtypeStruct((mesh.size, 24, elements // 24), np.float32)
    return jax.jit(f).trace(x).lower(lowering_platforms=(platform,)).as_text()


def sent_bytes(kind, size, n):
    """Bytes that one rank sends or reads, where its results have `size` bytes."""
    factors = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
    return round(factors.get(kind, (n - 1) / n) * size)


def calls(text):
    """Kind, groups and bytes of results of the collectives of a program, in their order."""
    kinds = "all_reduce|reduce_scatter|all_gather|all_to_all"
    pattern = rf"stablehlo\.({kinds})\b.*?replica_groups = dense<(.*?)>.*?-> tensor<([\dx]*)xf32>"
    found = re.findall(pattern, text, re.DOTALL)
    assert len(found) == len(re.findall(r"stablehlo\.(?:collective|all|reduce_scatter|custom_call @jax)", text))
    return [
        (kind.replace("_", "-"), json.loads(groups), 4 * math.prod(map(int, shape.split("x"))))
        for kind, groups, shape in found
    ]


def collectives(text, local, groups=None):
    """As in OPS. The replica groups must be the node groups or the rail groups."""
    members = [list(range(8))] if groups is None else groups
    nodes = [group[i : i + local] for group in members for i in range(0, len(group), local)]
    rails = [group[i::local] for group in members for i in range(local)]
    names = {str(nodes): "node", str(rails): "rail"}
    return ", ".join(f"{names[str(found)]} {kind}" for kind, found, _ in calls(text))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("min_chunk_bytes", [None, 64])
def test_program_has_the_collectives_and_bytes_of_the_plan(mesh, monkeypatch, op, min_chunk_bytes):
    """Chunks change neither groups nor bytes."""
    if min_chunk_bytes:
        monkeypatch.setattr(_xla_hierarchical, "_MIN_CHUNK_BYTES", min_chunk_bytes)
    text = lowered(op, mesh, AXES, elements=24 * 32)
    stages = collectives(text, 4)
    if min_chunk_bytes is None:
        assert stages == OPS[op][1]
    assert set(stages.split(", ")) == set(OPS[op][1].split(", "))
    plan = jaxcomm.explain(
        op, jax.ShapeDtypeStruct((24, 32), "float32"), (2, 4), algorithm="hierarchical",
        **({"source": 4} if op == "pbroadcast" else {}),
    )  # fmt: skip
    sent = {4: 0, 2: 0}
    for kind, groups, size in calls(text):
        sent[len(groups[0])] += sent_bytes(kind, size, len(groups[0]))
    assert (sent[4], sent[2]) == (plan.bytes["node"], plan.bytes["network"])


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_chunks_are_a_pipeline_on_every_platform(mesh, monkeypatch, platform):
    """A stage has one collective per chunk. Each waits for the one before, so that XLA does not combine them."""
    counts = {}
    for size in (1 << 30, 1024):
        monkeypatch.setattr(_xla_hierarchical, "_MIN_CHUNK_BYTES", size)
        text = lowered("psum", mesh, AXES, platform, elements=24 * 32)
        assert "custom_call" not in re.sub(r"@(Sharding|SPMD\w*)", "", text)
        counts[size] = [text.count(f"stablehlo.{name}") for name in ('all_reduce"', "optimization_barrier")]
    assert counts == {1 << 30: [1, 0], 1024: [3, 6]}


@pytest.mark.parametrize("op", OPS)
def test_the_largest_buffer_decides_the_number_of_chunks(mesh, monkeypatch, op):
    """The block has 3 KiB, the result of an all_gather 24 KiB. There are at most 4 chunks."""
    monkeypatch.setattr(_xla_hierarchical, "_MIN_CHUNK_BYTES", 1024)
    found = calls(lowered(op, mesh, AXES, elements=24 * 32))
    assert len(found) == (4 if op == "all_gather" else 3) * len(OPS[op][1].split(", "))


def test_one_collective_where_there_are_no_two_levels(mesh, monkeypatch):
    def kinds(axes):
        return re.findall(r"stablehlo\.(all_\w+|reduce_scatter)", lowered("psum", mesh, axes))

    assert kinds("gpu") == ["all_reduce"]  # one node
    assert len(kinds(AXES)) == 3
    with monkeypatch.context() as patch:
        patch.setattr(placement, "ranks_per_node_for_xla", lambda *_: 1)
        assert kinds(AXES) == ["all_reduce"]  # one rank per node, or unequal nodes
    monkeypatch.setattr(_lowering, "config", lambda: _config.Config(algorithm="xla"))
    assert kinds(AXES) == ["all_reduce"]
