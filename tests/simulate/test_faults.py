"""Faults and hash collisions: closed forms of the exchange that they slow."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from test_clusters import TEXT

import jaxcomm
from jaxcomm.simulate import Cluster, ClusterError, collective, step
from jaxcomm.simulate.cluster import ecmp, faults, toml

H100 = Cluster.load("dgx-h100")
ADAPTER = 50e9 * 0.97
SIZE = 64 << 20
HOP = 1e-6  # latency of NVLink in the file


def _operand(num_bytes):
    return jax.ShapeDtypeStruct((num_bytes // 4,), np.float32)


def _shift(cluster, ranks=16, by=8, **options):
    """Every rank sends SIZE bytes to the same rank of the next domain."""
    perm = [(rank, (rank + by) % ranks) for rank in range(ranks)]
    return collective("ppermute", _operand(SIZE), ranks, cluster=cluster, perm=perm, **options)


def _with(text, name="dgx-h100"):
    return Cluster.load(name, {f"fault.{key}": value for key, value in (one.split("=") for one in text.split())})


def test_the_ranks_that_are_left_go_on():
    """Inside a domain the others go on; of several domains, the one with the lost rank leaves."""
    x = _operand(1 << 20)
    for ranks, left in ((8, 7), (64, 56)):
        found = collective("psum", x, ranks, cluster=_with("rank[3]=lost"))
        assert found.ranks == left
        assert found.time_s == collective("psum", x, left, cluster=H100).time_s
        assert "rank 3 lost" in found.notes
        blocks = collective("all_to_all", x, ranks, cluster=_with("rank[3]=lost"))
        assert blocks.bytes == -(-(1 << 18) // left) * left * 4  # rounded up to equal blocks
    with pytest.raises(ValueError, match="perm names ranks of a group of 16, of which 8 are lost"):
        _shift(_with("rank[3]=lost"))
    for ranks, source in ((8, 7), (64, 60)):
        found = collective("pbroadcast", x, ranks, source=source, cluster=_with("rank[3]=lost"))
        after = {8: 6, 64: 52}[ranks]
        assert found.time_s == collective("pbroadcast", x, found.ranks, source=after, cluster=H100).time_s
    with pytest.raises(ValueError, match="source 5 is lost"):  # with its domain
        collective("pbroadcast", x, 64, source=5, cluster=_with("rank[3]=lost"))


def test_a_lost_plane_takes_its_share():
    planes = Cluster.load("planes-h100")
    number = planes.levels[1].planes
    assert number > 1
    lost = Cluster.load("planes-h100", {"fault.leaf.planes": "1"})
    extra = _shift(lost).time_s - _shift(planes).time_s
    rate = planes.levels[1].bytes_per_s
    assert extra == pytest.approx(SIZE / rate * (number / (number - 1) - 1), rel=1e-6)
    one = {"max_sms": 1}  # a thread block uses one plane, so it loses nothing
    assert _shift(lost, **one).time_s == pytest.approx(_shift(planes, **one).time_s)
    assert _shift(planes, **one).time_s == pytest.approx(4 * _shift(H100, **one).time_s, rel=0.05)
    assert _shift(planes).time_s == pytest.approx(_shift(H100).time_s)
    sprayed = Cluster.load("planes-h100", {"leaf.routing": "spray", "fault.leaf.planes": "1"})  # a block uses all
    assert _shift(sprayed, **one).time_s - _shift(H100, **one).time_s == pytest.approx(extra, rel=1e-6)
    with pytest.raises(ClusterError, match=r"level leaf has 4 plane\(s\), and one must be left"):
        Cluster.load("planes-h100", {"fault.leaf.planes": "4"})


def test_a_lost_adapter_of_64_ranks():
    """Reduces over a relay have weights whose sums are not exact. A second adapter has both loads."""
    x, clusters = _operand(16 << 20), (_with("leaf[3]=0"), H100)
    found, healthy = (collective("psum", x, 64, cluster=c, algorithm="hierarchical") for c in clusters)
    assert found.bound_beta_s == pytest.approx(2 * 2 * 7 / 8 * (16 << 20) / 8 / ADAPTER)
    assert found.bottleneck.startswith("leaf") and healthy.time_s < found.time_s


def test_the_busiest_of_hashed_links():
    """Two transfers on two links collide in one of two cases; many follow F/S + sqrt(2 F/S ln S)."""
    assert ecmp.load(1, 4) == 4  # one of four links has all
    assert ecmp.load(2, 2) == pytest.approx(1.5, rel=0.1)
    assert ecmp.load(3, 2) == pytest.approx((2 * 3 + 6 * 2) / 8 * 2 / 3, rel=0.05)
    for flows, paths in ((4096, 8), (8192, 32)):
        mean = flows / paths
        assert ecmp.load(flows, paths) == pytest.approx(1 + math.sqrt(2 * math.log(paths) / mean), rel=0.05)


def _step(f, sizes, cluster, size=SIZE, **options):
    mesh = AbstractMesh(sizes, ("data", "model"))
    run = jax.shard_map(f, mesh=mesh, in_specs=(P(),), out_specs=P(), check_vma=False)
    return step(run, [_operand(size)], mesh=mesh, cluster=cluster, **options)


def _along(axis, by, size):
    return lambda x: jaxcomm.ppermute(x, axis, [(rank, (rank + by) % size) for rank in range(size)])


@pytest.mark.parametrize(
    ("fault", "axis", "sizes", "by", "extra"),
    [
        ("leaf[11]=0.5", "data", (4, 8), 1, SIZE / ADAPTER),
        ("leaf[11]=lost", "data", (4, 8), 1, SIZE / ADAPTER),  # ranks 11 and 12 share an adapter
        ("leaf[11]=lost leaf[12]=0.5", "data", (4, 8), 1, 3 * SIZE / ADAPTER),  # a quarter for each
        ("leaf[11]=lost leaf[12]=lost", "data", (4, 8), 1, 2 * SIZE / ADAPTER),  # rank 13 relays both
        ("leaf[9]=lost leaf[11]=lost leaf[12]=lost", "data", (4, 8), 1, 2 * SIZE / ADAPTER),
        ("leaf[11].in=0.25 leaf[11].out=0.5", "data", (4, 8), 1, 3 * SIZE / ADAPTER),
        ("leaf[11]=0.5 leaf[20]=0.25 leaf[29]=0.5", "data", (4, 8), 1, 3 * SIZE / ADAPTER),
        ("spine[13].up=0.5", "data", (64, 8), 32, SIZE / ADAPTER),  # rail 5 of the second leaf
        ("spine[13].down=0.5", "data", (64, 8), 32, SIZE / ADAPTER),
        ("leaf[11]=0.5", "model", (4, 8), 1, 0),
        ("spine[13]=0.5", "data", (4, 8), 1, 0),  # the mesh has one leaf
        ("nvlink[11]=0.5", "model", (4, 8), 1, SIZE / (450e9 * 0.78)),
        ("leaf.planes=1", "data", (4, 8), 1, SIZE / (0.97 * 400e9 / 8) / 3),
    ],
)
def test_a_step_waits_for_its_slowest_group(fault, axis, sizes, by, extra):
    """One of the groups of an axis has the fault; all groups shift at once."""
    name = "planes-h100" if "planes" in fault else "dgx-h100"
    broken, healthy = _with(fault, name), Cluster.load(name)
    f = _along(axis, by, sizes[0] if axis == "data" else sizes[1])
    found = _step(f, sizes, broken)
    assert found.time_s - _step(f, sizes, healthy).time_s == pytest.approx(extra, rel=1e-6, abs=1e-9)
    assert (found.notes[: len(broken.faults)] == tuple(map(str, broken.faults))) == (extra > 0)  # only those that act


@pytest.mark.parametrize(
    ("given", "slow", "share"),
    [
        ({}, 1, 1),
        ({"nvlink[3]": "0.5"}, 1, 0.5),
        ({"rank[3]": "4"}, 4, 0.25),
        ({"rank[3]": "4", "nvlink[5]": "0.2"}, 4, 0.2),
        ({"nvlink[1]": "0.5", "nvlink[2]": "0.2", "nvlink[3]": "0.4"}, 1, 0.2),
        ({"rank[1]": "2", "rank[2]": "4", "rank[3]": "3"}, 4, 0.25),
    ],
)
def test_ll_messages_wait_for_the_weakest_rank(given, slow, share):
    cluster = Cluster.load("dgx-h100", {f"fault.{key}": value for key, value in given.items()})
    found = collective("all_gather", _operand(1 << 16), 8, cluster=cluster, algorithm="ll")
    overhead_s, rate, latency_s = cluster.ll
    beta_s, alpha_s = 7 * (1 << 16) / (rate * share), 7 * overhead_s * slow + latency_s
    assert (found.bound_beta_s, found.bound_alpha_s) == pytest.approx((beta_s, alpha_s))
    assert found.time_s == pytest.approx(2.2e-6 + alpha_s + beta_s)
    assert found.utilisation == {"nvlink out (LL)": pytest.approx(beta_s / found.time_s)}


def test_a_fault_of_a_rank_whose_group_stays_in_a_domain_does_not_act():
    """Ranks 2 and 3 are one domain; other groups cross the leaf."""
    rows = [[0, 8], [1, 9], [2, 3], [10, 11], [4, 12], [5, 13], [6, 14], [7, 15]]

    def f(x):
        return jaxcomm.psum(x, ("data", "model"), axis_index_groups=rows)

    healthy = _step(f, (2, 8), H100)
    for rank, acts in ((1, True), (2, False)):
        found = _step(f, (2, 8), _with(f"leaf[{rank}]=0.5"))
        assert (found.time_s > healthy.time_s) == acts
        assert any("without effect" in note for note in found.notes) == (not acts)


@pytest.mark.parametrize(("size", "messages"), [(4, 3), (2, 2)])
def test_a_relay_outside_of_a_group_adds_the_latency_of_the_domain(size, messages):
    """To each signal of the relayed rank and to it. All rounds of a ring but the last send a signal to the next round.

    Of five signals around a ring of four, three have the rank at one end. In a ring of two, the last message has a hop
    too. Without the hop, the rank has half an adapter.
    """

    def f(x):
        return jaxcomm.psum(x, "data", algorithm="ring")

    relayed, half = (_step(f, (size, 8), _with(f"leaf[11]={share}"), 4096) for share in ("lost", "0.5"))
    assert relayed.collectives[0].time_s - half.collectives[0].time_s == pytest.approx(messages * HOP, rel=1e-6)


def test_the_source_of_a_broadcast_over_reordered_axes_is_renumbered():
    """("model", "data") numbers ranks column by column: source 1 is rank 8, whose adapter is weak."""

    def time(axes, source):
        return _step(lambda x: jaxcomm.pbroadcast(x, axes, source), (4, 8), _with("leaf[8].out=0.25")).time_s

    assert time(("model", "data"), 1) == time(("data", "model"), 8) > time(("data", "model"), 1)


def test_kernels_and_collectives_of_a_step_wait_for_a_slow_rank():
    def f(x):
        return jaxcomm.psum(x * 2, "model")

    slow, healthy = (_step(f, (4, 8), c, 1 << 20) for c in (_with("rank[9]=2"), H100))
    assert slow.compute_s == pytest.approx(2 * healthy.compute_s)
    large = _step(lambda x: x * jaxcomm.psum(x[:1], "model"), (4, 8), _with("rank[9]=2"), 1 << 28)
    assert large.why.endswith("most of it for bytes of memory")
    alone = collective("psum", _operand(1 << 20), 8, cluster=_with("rank[1]=2"))
    assert slow.collectives[0].time_s == pytest.approx(alone.time_s) and alone.time_s > healthy.collectives[0].time_s


def test_a_step_notes_slow_and_lost_ranks_as_given():
    both = Cluster.load("dgx-h100", {"fault.rank[3]": "lost", "fault.rank[17]": "2", "fault.rank[5]": "3"})
    found = _step(_along("data", 1, 4), (4, 8), both)
    assert "rank 17 2 times as slow" in found.notes and "rank 3 lost" in found.notes
    assert "without effect on this step: rank 5 3 times as slow" in found.notes  # its domain left
    assert "each kernel takes the time of the slowest rank" in found.notes


def test_other_ranks_replace_a_lost_one():
    f = _along("data", 1, 4)
    found = _step(f, (4, 8), _with("rank[3]=lost"))
    assert found.time_s == _step(f, (4, 8), H100).time_s and any("replace" in note for note in found.notes)
    full = dataclasses.replace(_with("rank[3]=lost"), levels=_with("rank[3]=lost").spread(32).levels)
    with pytest.raises(ClusterError, match="the mesh has 32 ranks, but 24 are left"):
        _step(f, (4, 8), full)


def test_transfers_of_all_groups_of_a_step_collide():
    """256 groups of two ranks, one in each leaf: 32 ranks of a rail share 8 uplinks, as in one group of 512."""
    hashed = Cluster.load("dgx-h100", {"spine.routing": "ecmp", "spine.paths": "8"})
    found, healthy = (_step(_along("data", 1, 2), (2, 256), cluster) for cluster in (hashed, H100))
    assert found.time_s - healthy.time_s == pytest.approx((ecmp.load(32 * 32, 8) - 1) * SIZE / ADAPTER, rel=1e-6)
    times = f"{ecmp.load(32 * 32, 8):.2f}"
    assert f"hash collisions on spine: the busiest of 8 links has {times} times the mean (1 place(s))" in found.notes


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("leaf[32]=0.5", r"fault leaf\[32\] with 0.5 of its bandwidth: the index must be below 32"),
        ("nvlink[1]=0", "would be cut off"),
        ("leaf[11].out=0", "would be cut off"),
        ("spine[99999]=0.5", r"fault spine\[99999\] with 0.5 of its bandwidth: the index must be below 4096"),
        ("rank[999999]=lost", "fault rank 999999 lost: the index must be below 131072"),
    ],
)
def test_faults_that_a_step_cannot_have(fault, message):
    with pytest.raises(ValueError, match=message):
        _step(_along("model", 1, 8), (4, 8), _with(fault))


def _faults(*texts):
    listed = ", ".join(f'"{text}"' for text in texts)
    return Cluster(**toml.parse(f"fault = [{listed}]\n{TEXT}", "two.toml"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["leaf=0.5"], r"two.toml: fault leaf=0.5: expected LEVEL\[INDEX\]=SHARE, LEVEL.planes=LOST"),
        (["leaf[1]=much"], r"expected LEVEL\[INDEX\]=SHARE"),
        (["other[1]=0.5"], "got 'other', expected one of the levels nvlink, leaf, spine"),
        (["leaf[1]=1.5"], "got 1.5, expected a share"),
        (["leaf[1]=0.5", "leaf[1].in=0.2"], "fault 2 .* contradicts"),
        (["rank[1]=0.5"], "expected rank.* a factor of at least 1"),
        (["rank[1]=2", "rank[1]=3"], "fault 2 .* contradicts an earlier fault of the same place"),
        (["rank[1]=lost", "leaf[2]=0.5"], "fault 2 .* the loss of a rank"),
        (["leaf.planes=1"], r"level leaf has 1 plane\(s\)"),
        (["leaf.planes=0.5"], "got 0.5, expected the number of lost planes"),
    ],
)
def test_faults_that_cannot_be_are_named(texts, message):
    with pytest.raises(ClusterError, match=message):
        _faults(*texts)


def test_a_file_has_faults():
    texts = ["leaf[1].out=0.5", "leaf[1].in=0.2", "spine[0].down=0", "leaf[2]=lost", "rank[3]=2"]
    found = _faults(*texts)
    assert [str(f) for f in found.faults] == [
        "leaf[1].out with 0.5 of its bandwidth", "leaf[1].in with 0.2 of its bandwidth", "spine[0].in lost",
        "leaf[2] lost", "rank 3 2 times as slow",
    ]  # fmt: skip
    assert "fault: rank 3" in str(found)
    with pytest.raises(ClusterError, match=r"two\.toml: fault: expected texts such as"):
        toml.parse("fault = [{ rank = 3 }]" + TEXT, "two.toml")


def test_ranks_behind_lost_domains_get_new_numbers():
    """Of 5 domains of 8 ranks, the first and the third leave. The fourth is then the second."""
    lost = [faults.Fault(index=index, slow=0) for index in (3, 17)]
    slow = [faults.Fault(index=index, slow=2.0) for index in (9, 16, 26)]
    left, kept = faults.survive([*lost, *slow], 40, 8)
    assert (left, [fault.index for fault in kept]) == (24, [1, 10])
    left, kept = faults.survive([*lost, *slow], 20, 32)  # of one domain, the ranks alone
    assert (left, [fault.index for fault in kept if fault.index < 18]) == (18, [8, 15])
