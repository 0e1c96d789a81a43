"""Expected rows of a mixture of experts, by enumeration, and explain() for dispatch and combine."""

import itertools

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm import _selftest_record
from jaxcomm.moe.expected import groups_of_token, rows_of


@pytest.mark.parametrize(("groups", "num_experts", "choices"), [(1, 4, 2), (2, 6, 1), (3, 6, 3), (4, 8, 8), (2, 8, 4)])
def test_groups_of_a_token_by_enumeration(groups, num_experts, choices):
    drawn = list(itertools.combinations(range(num_experts), choices))
    mean = np.mean([len({e // (num_experts // groups) for e in chosen}) for chosen in drawn])
    assert groups_of_token(groups, num_experts, choices) == pytest.approx(mean)


def test_rows_of_a_rank():
    rows = rows_of(tokens=3, choices=2, num_experts=8, num_ranks=4)
    assert (rows.choices, rows.sent, rows.most_received) == (6, 4.5, 24)
    assert rows.tokens_sent == pytest.approx(3 * 0.75 * 4 * (1 - 15 / 28))
    # A rank has one expert only: no token has two rows there.
    assert rows_of(3, 2, 4, 4).most_received == 12
    assert rows_of(3, 2, 8, 1).sent == 0
    assert rows.between_nodes == 0
    assert rows_of(3, 2, 8, 4, num_nodes=2).between_nodes == pytest.approx(3 * 11 / 14)  # both choices: 3 / 14


X, LARGE = jax.ShapeDtypeStruct((4096, 7168), "bfloat16"), {"platform": "cuda", "num_experts": 256, "choices": 8}


def test_dispatch_between_nodes_is_explained_with_rows_once_per_node():
    found = jaxcomm.explain("moe.dispatch", X, (2, 8), algorithm="hierarchical", **LARGE)
    row = 2 * 7168
    assert found.algorithm == "hierarchical" and found.rows.between_nodes == pytest.approx(4096 * 0.997, rel=1e-3)
    positions = 4096 * 4 * 4 * found.sms
    assert found.bytes["network"] == pytest.approx(found.rows.between_nodes * row + positions, rel=1e-6)
    assert "4082 to other nodes in dispatch, once per token and node" in str(found)
    (link,) = [link for link in found.links if link.name == "network"]
    once = found.bytes["network"] / link.bytes_per_s
    assert once < found.predicted_time_s < 2 * once
    back = jaxcomm.explain("moe.combine", X, (2, 8), algorithm="hierarchical", **LARGE)
    lists = (4096 * 4 * 8 + back.rows.between_nodes * 4) * back.sms
    assert back.bytes["network"] == pytest.approx(back.rows.between_nodes * row + lists, rel=1e-6)
    assert once < back.predicted_time_s < 2.5 * once
    assert "inside nodes; 4082 sums back in combine, one per token and node; slots for 32768" in str(back)


def test_between_nodes_the_selftest_decides(monkeypatch):
    monkeypatch.setattr(_selftest_record, "key", lambda: None)  # GPUs that are not at hand
    elsewhere = jaxcomm.explain("moe.combine", X, (2, 8), **LARGE)
    assert elsewhere.algorithm == "hierarchical"
    assert elsewhere.reason == "assumes that the self-test has passed between nodes of these GPUs"
    # Of one host, outside of the program on several hosts that the self-test was.
    monkeypatch.setattr(_selftest_record, "key", lambda: {"gpus": "G", "hosts": "one"})
    recorded = [{"gpus": "F", "hosts": "several"}, {"gpus": "G", "hosts": "one"}]
    row = _selftest_record.Row(_selftest_record.EXPERTS, "experts", "float32", 8, 16, 8, wrong=0)
    monkeypatch.setattr(_selftest_record, "rows_of", lambda key: ([row] if key in recorded else [], ""))
    with pytest.raises(ValueError, match=r"'xla' runs .the self-test has not passed between nodes of these GPUs"):
        jaxcomm.explain("moe.combine", X, (2, 8), **LARGE)
    recorded.append({"gpus": "G", "hosts": "several"})
    found = jaxcomm.explain("moe.combine", X, (2, 8), **LARGE)
    assert (found.algorithm, found.reason) == ("hierarchical", "the self-test has passed between nodes")
    named = jaxcomm.explain("moe.combine", X, (2, 8), algorithm="hierarchical", **LARGE)
    assert named.bytes == found.bytes and named.reason != found.reason
    with pytest.raises(ValueError, match=r"has no plan, because it runs XLA's own"):
        jaxcomm.explain("moe.combine", X, (2, 8), gin=False, **LARGE)
    many = jax.ShapeDtypeStruct((600_000, 16), jax.numpy.bfloat16)
    with pytest.raises(ValueError, match=r"4800000 choices of a rank, 8 per token, and 256 experts exceed"):
        jaxcomm.explain("moe.combine", many, (2, 8), **LARGE)


@pytest.mark.parametrize("op", ["moe.dispatch", "moe.combine"])
def test_explained_on_gpus(op):
    x = jax.ShapeDtypeStruct((128, 256), np.float32)
    found = jaxcomm.explain(op, x, 4, platform="cuda", num_experts=16, choices=2)
    row = 1024
    # dispatch sends a token with both experts at one rank once: two of 16 experts are in one of four groups.
    each = int(128 * row * 4 * (1 - 12 * 11 / (16 * 15))) // 4 if op == "moe.dispatch" else 64 * row
    assert found.bytes == {"self": each, "node": 3 * each, "network": 0}
    assert found.rows == rows_of(128, 2, 16, 4)
    assert "rows      173 to other ranks in dispatch, once per token and rank; 192 of 256 choices back in" in str(found)
    assert "combine; slots for 256, worst case 1024; assumes that tokens choose experts evenly" in str(found)
    (link,) = [link for link in found.links if link.name == "node"]
    assert found.predicted_time_s > found.launch_s + found.sync_overhead_s + 3 * each / link.bytes_per_s
    assert "rows " not in str(jaxcomm.explain("psum", x, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platform": "cpu"}, "is explained for GPUs only: pass platform='cuda'"),
        ({"axis_sizes": (2, 2), "gin": False}, "'xla' runs .the self-test has not passed between nodes"),
        ({"axis_sizes": (2, 2), "algorithm": "hierarchical", "gin": False}, "needs GIN, which NCCL does not have"),
        ({"axis_sizes": (2, 2), "algorithm": "direct"}, '"direct" runs inside a node'),
        ({"num_experts": None}, "pass num_experts and choices"),
        ({"num_experts": 10}, "10 experts and 2 choices do not fit 4 ranks"),
        ({"choices": 17}, "16 experts and 17 choices do not fit 4 ranks"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"axis_sizes": 4, "platform": "cuda", "num_experts": 16, "choices": 2} | change
    with pytest.raises(ValueError, match=message):
        jaxcomm.explain("moe.dispatch", jax.ShapeDtypeStruct((8, 4), np.float32), **arguments)
