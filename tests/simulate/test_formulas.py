"""Formulas and rules of jaxcomm.simulate.nccl and of the laboratory: closed formulas, worked by hand."""

import importlib.resources
import itertools
import json

import made
import numpy as np
import pytest

from jaxcomm.simulate import Cluster
from jaxcomm.simulate.nccl import formulas, predict, rules
from tools.simulator import forms
from tools.simulator.priors import PRIORS
from tools.simulator.rows import features

MIB = 2**20
RING = {
    "lambda_ll": 1.0, "lambda_ll128": 2.0, "lambda_simple": 5.0,
    "share_ll": 0.25, "share_ll128": 0.5, "share_simple": 0.8, "self": 0.2,
}  # fmt: skip


def test_a_ring_takes_its_steps_and_its_bytes(tmp_path):
    """8 ranks, 8 MB: 14 steps, 14/8 of the bytes over links of 900 GB/s; Simple copies 2/8 through 1600 GB/s too."""
    times = formulas.ring(made.features_of(tmp_path, op="all_reduce", bytes=8_000_000), RING)[:, 0]
    wire = 14e6 / 900e3
    np.testing.assert_allclose(times, [14 + wire / 0.25, 28 + wire / 0.5, 70 + wire / 0.8 + 2e6 / 1600e3])
    half = formulas.ring(made.features_of(tmp_path, op="all_gather", bytes=8_000_000), RING)[:, 0]
    np.testing.assert_allclose(2 * half, times)


def test_multicast_sends_each_byte_once(tmp_path):
    p = {"nvls": 60.0, "share_nvls": 0.5}
    assert formulas.multicast(made.features_of(tmp_path, bytes=8_000_000), p) == pytest.approx(60 + 9e6 / 450e3)
    assert formulas.multicast(made.features_of(tmp_path, bytes=8_000_000, ranks=2), p) == np.inf
    assert formulas.multicast(made.features_of(tmp_path, hardware="8x A100"), p) == np.inf


def test_a_tree_grows_with_the_logarithm_of_hosts(tmp_path):
    p = {"tree_inner": 3.0, "tree_outer": 4.0, "share_tree": 1e12}
    found = [formulas.tree(made.features_of(tmp_path, ranks=n), p)[0] for n in (4, 8, 16, 64)]
    np.testing.assert_allclose(found, [18, 18 + 8, 18 + 16, 18 + 32])


def test_messages_share_channels(tmp_path):
    p = {
        "per_peer": 0.5, "host_start": 10.0, "rendezvous": 20.0, "channel_ll": 5.0, "channel_simple": 20.0,
        "share_peer": 1.0, "share_simple": 0.8, "self": 0.2,
    }  # fmt: skip
    # 64 ranks, 1 channel each, 32 at a time: two rounds. 64 KiB to each is LL.
    small = formulas.messages(made.features_of(tmp_path, op="all_to_all", ranks=64, bytes=64 * 65536), p)
    assert small == pytest.approx(63 * 0.5 + 2 * 65536 / 5e3)
    # 4 ranks in one host start later; 256 MB to each peer on 8 channels, doubled once: 16 MiB x 16. 2 rounds.
    m = 256 * MIB
    large = formulas.messages(made.features_of(tmp_path, op="all_to_all", ranks=4, bytes=4 * m), p)
    assert large == pytest.approx(1.5 + 10 + 20 + max(2 * m / 16 / 20e3, 3 * m / 720e3, m / 1600e3))
    # A permute has one peer, no term for peers, and one round; 72 ranks: one channel.
    permute = formulas.messages(made.features_of(tmp_path, op="collective_permute", ranks=72, bytes=4 * MIB), p)
    assert permute == pytest.approx(20 + 4 * MIB / 20e3)


def test_a_mesh_has_a_link_for_each_pair(tmp_path):
    """MI355X: 7 links of 76.8 GB/s; 2 ranks use one, 8 ranks seven."""
    p = {name: prior.center for name, prior in PRIORS["mesh"].items()}
    p |= {"launch": 0, "lambda_ll": 1e9, "lambda_ll128": 1e9, "lambda_simple": 0.0, "growth": 0, "self": 1e12}
    row = {"hardware": "8x MI355X", "interconnect": "xGMI", "op": "all_gather", "bytes": 8_000_000, "ranks_per_node": 8}
    two, eight = (forms.mesh(made.features_of(tmp_path, ranks=n, **row), p)[0] for n in (2, 8))
    assert two == pytest.approx(4e6 / (0.8 * 76.8e3))
    assert eight == pytest.approx(7e6 / (0.8 * 537.6e3))


def test_network_plans(tmp_path):
    row = {"interconnect": "2x 400 Gb/s InfiniBand per rank; NVLink and shared memory disabled", "op": "all_gather"}
    q = made.features_of(tmp_path, bytes=8_000_000, **row)
    p = {"launch": 30.0, "hop_ll": 10.0, "hop_simple": 16.0, "nic_ll": 0.05, "nic_simple": 1.0}
    assert forms.stepwise(q, p) == pytest.approx(30 + 7 * min(10 + 1e6 / 5e3, 16 + 1e6 / 100e3))
    assert forms.doubling(q, p) == pytest.approx(30 + min(30 + 7e6 / 5e3, 48 + 7e6 / 100e3))


def test_a_cluster_is_bounded_by_adapters_or_by_links(tmp_path):
    """2 nodes of 8 H100 with 50 GB/s each: all_reduce moves b through 400 GB/s and 15/8 b over each link."""
    row = {"hardware": "8x H100", "interconnect": "NVLink4 + 400 Gb/s InfiniBand per GPU", "ranks_per_node": 8}
    q = made.features_of(tmp_path, ranks=16, bytes=400_000_000, **row)
    p = {"launch": 1, "per_step": 0.1, "hop_ll": 1e9, "hop_simple": 5.0, "nic_ll": 1, "nic_simple": 0.5}
    slow = formulas.cluster(q, {**p, "share_simple": 1.0})
    assert slow == pytest.approx(1 + 3 + 10 + max(4e8 / 200e3, 7.5e8 / 450e3))
    assert formulas.cluster(q, {**p, "share_simple": 0.5}) == pytest.approx(1 + 3 + 10 + 7.5e8 / 225e3)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (4, 3)])
def test_dispatch_sends_a_token_once_to_each_rank(tmp_path, n, k):
    """All choices of ranks for the k experts of a token, counted."""
    choices = list(itertools.product(range(n), repeat=k))
    copies = np.mean([len(set(choice) - {0}) for choice in choices])
    row = {"op": "ep_dispatch", "bytes": 64 * k * 100, "ranks": n, "note": f"tokens=64; topk={k}"}
    assert made.features_of(tmp_path, **row).bytes[0] == pytest.approx(64 * 100 * copies)
    combine = made.features_of(tmp_path, **{**row, "op": "ep_combine"}).bytes[0]
    assert combine == pytest.approx(64 * k * 100 * (n - 1) / n)


@pytest.mark.parametrize(
    ("form", "kind", "op", "name", "ranks", "size", "library"),
    [
        ("domain", "H100", "psum", "all_reduce", 8, 1 << 20, "2.27"),
        ("domain", "H100", "all_gather", "all_gather", 4, 8 << 10, "2.28"),
        ("cluster", "H100", "psum_scatter", "reduce_scatter", 64, 1 << 26, "2.28"),
        ("domain", "H100", "ppermute", "collective_permute", 2, 1 << 16, "2.29"),
        ("domain", "H100", "all_to_all", "all_to_all", 8, 1 << 20, "2.28"),
        ("domain", "GB200", "all_to_all", "all_to_all", 72, 72 << 16, "2.28.3"),
        ("domain", "GB200", "all_to_all", "all_to_all", 72, 72 << 16, "2.29"),
        ("domain", "GB200", "all_to_all", "all_to_all", 8, 8 << 16, "2.28"),  # of two hosts
        ("domain", "GB200", "psum", "all_reduce", 18, 1 << 30, "2.28"),
        ("cluster", "GB200", "all_gather", "all_gather", 144, 144 << 13, "2.28"),
    ],
)
def test_a_prediction_is_that_of_the_row_of_a_table(tmp_path, form, kind, op, name, ranks, size, library):
    """The cluster is read as tools.simulator reads a row; parameters and quantiles come from the file itself."""
    row = {"op": name, "ranks": ranks, "bytes": size, "note": f"lib=NCCL {library}"}
    row |= {"hardware": "8x H100", "ranks_per_node": 8} if kind == "H100" else {}
    q = made.features_of(tmp_path, interconnect="NVLink; 400 Gb/s InfiniBand per GPU", **row)
    data = json.loads(importlib.resources.files(predict.__package__).joinpath("data/parameters.json").read_text())
    evidence, values = data["parameters"][form][kind]
    quantiles = data["intervals"][evidence][sum(size >= edge for edge in (1 << 16, 1 << 20, 1 << 26))]
    times = formulas.FORMS[form](q, values)[0] * 1e-6 * np.exp([0, *quantiles])
    operand = size // ranks if op == "all_gather" else size
    loaded = Cluster.load({"H100": "dgx-h100", "GB200": "gb200-nvl72"}[kind], {"leaf.efficiency": "1"})
    found = predict.predict(op, operand, ranks, loaded, f"nccl-{library}")
    assert (found.time_s, *found.interval) == pytest.approx(tuple(times))
    given = found.name, found.op, found.ranks, found.bytes, found.evidence
    assert given == (f"nccl-{library}", op, ranks, operand, evidence) and f"evidence    {evidence}" in str(found)


def test_channels_start_at_32_over_the_ranks_and_double(tmp_path):
    ranks = np.array([2, 4, 8, 16, 18, 36, 72])
    np.testing.assert_array_equal(rules.message_channels(ranks, ranks, 1.0 * ranks), [16, 8, 4, 2, 1, 1, 1])
    sizes = np.array([16, 17, 32, 33, 128, 2048]) * float(MIB)
    np.testing.assert_array_equal(rules.message_channels(72, np.full(6, 72), sizes), [1, 2, 2, 4, 8, 32])


def test_versions_differ_in_what_a_message_of_ll_may_hold(tmp_path):
    def old(library):
        return bool(made.features_of(tmp_path, note=f"lib={library}").old_ll[0])

    assert old("NCCL 2.26.2") and old("NCCL 2.28.3") and not old("NCCL 2.29") and not old("NCCL 2.30.7")
    np.testing.assert_array_equal(
        rules.message_ll_limit(np.array([1, 1, 4]), np.array([True, False, False])), [2**19, 2**14, 2**16]
    )


def test_nccl_changes_protocol_with_size(tmp_path):
    """all_gather on 4 ranks of an NVL72 goes to Simple between 4 and 8 MiB (measured: 28 and 55 us)."""
    rows = made.sweep(["all_gather"], [4, 8], [2**k for k in range(10, 30)])
    four, eight = rules.ring_protocol(features(made.read(tmp_path / "t.csv", rows))).reshape(2, -1)
    assert four[22 - 10] == 0 and four[23 - 10] == 2
    assert list(dict.fromkeys(eight)) == [0, 1, 2]
    assert (np.diff(four) >= 0).all() and (np.diff(eight) >= 0).all()


def test_experts_start_and_send(tmp_path):
    """128 x 7168 x 8 values of two bytes, of which 7/8 leave; the times of the start and of the bytes meet smoothly."""
    row = {"op": "ep_combine", "dtype": "bfloat16", "bytes": "", "note": "tokens=128; hidden=7168; topk=8"}
    assert made.features_of(tmp_path, **row).bytes[0] == 128 * 7168 * 8 * 2 * 7 / 8
    q = made.features_of(tmp_path, op="ep_combine", bytes=8_000_000)
    p = {"launch": 10.0, "per_peer": 0.0, "share_simple": 7 / 9, "nic_simple": 1.0, "sharpness": 2.0}
    assert forms.experts(q, p) == pytest.approx(np.hypot(10, 10))
