"""Clusters as TOML: those of the package are complete, and errors name file and key."""

import dataclasses
import math

import pytest

from jaxcomm._core import sim
from jaxcomm.simulate import Cluster, ClusterError
from jaxcomm.simulate.cluster import toml
from jaxcomm.simulate.cluster.toml_table import BYTES, FLOPS, ORIGINS, RATES, TIMES


def parse(text, file):
    return Cluster(**toml.parse(text, file))


TEXT = """
name = "two levels"

[device]
kind = "H100"
hbm = 3350
copy = "0.56 TB/s"
copy_overhead = 0.3
flops_bf16 = "989 Tflop/s"
origin = "datasheet: a source"

[kernel]
launch = 2
sync = "5000 ns"
channels = 32
channel = 20.6
origin = "guess"

[[level]]
nvlink = { ranks = 8, kind = "switch", bandwidth = 450, efficiency = 0.8, latency = 1, origin = "datasheet" }
[[level]]
[level.leaf]
ranks = 256
kind = "rails"
nics = 2
bandwidth = "400 Gb/s"
latency = 2.0
overhead = "1 us"
[level.leaf.origin]
nics = "datasheet"
bandwidth = "datasheet"
latency = "guess"
overhead = "measured: somewhere"
[[level]]
spine = { ranks = 4096, kind = "fat_tree", taper = 2, latency = 1.5, origin = "guess" }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm = 3350", "zzz = 3350", r"two.toml: device.zzz: unknown key; known are copy, .*, hbm, "),
        ("launch = 2", "launched = 2", r"two.toml: kernel.launched: unknown key \(did you mean launch\?\)"),
        # Before a table that is missing too.
        ("[device]", "[devise]", r"two.toml: devise: unknown key \(did you mean device\?\); known are device, fault, "),
        ("hbm = 3350\n", "", r"two.toml: device.hbm: is missing"),
        ("hbm = 3350", "hbm = -1", r"device.hbm: got -1 GB/s, expected more than 0"),
        ("0.56 TB/s", "0.56 TB", r"device.copy: got '0.56 TB', expected a number with one of the units GB/s"),
        ("latency = 2.0", "latency = -2.0", r"leaf.latency: got -2 us, expected at least 0"),
        ("channels = 32", "channels = 0", r"kernel.channels: got 0, expected at least 1"),
        ('"datasheet: a source"', '"hearsay"', r"device.origin: got 'hearsay', expected one of datasheet"),
        ('nics = "datasheet"\n', "", r"leaf.nics: has no origin"),
        ('nics = "datasheet"', 'nics = "datasheet"\nnisc = "guess"', r"leaf.nisc: unknown key"),
        ("ranks = 256", "ranks = 100", r"leaf.ranks: 100 is not a multiple of the 8 ranks of nvlink"),
        ('kind = "rails"', 'kind = "torus"', r"leaf.kind: got 'torus', expected one of switch, rails"),
        ("spine = {", 'spine = { routing = "luck",', r"spine.routing: got 'luck', expected spray or ecmp"),
        ("hbm = 3350", "hbm = 3350\nflops_efficiency = 1.5", r"device.flops_efficiency: got 1.5, .* at most 1"),
        ("efficiency = 0.8", "efficiency = 1.01", r"nvlink.efficiency: got 1.01, expected more than 0 and at most 1"),
        ("efficiency = 0.8", "efficiency = 0", r"nvlink.efficiency: got 0, expected more than 0 and at most 1"),
        ("taper = 2,", "taper = 0,", r"spine.taper: got 0, expected more than 0"),
        ('name = "two levels"', "", r"two.toml: name: is missing"),
        ("[[level]]\nspine", "[[level]]\nother = 1\nspine", r"level 3: expected one table with the name of the level"),
        ("hbm = 3350", "hbm = ", r"two.toml: .*line 6"),
    ],
)
def test_errors_name_file_and_key(old, new, message):
    assert TEXT.count(old) == 1
    with pytest.raises(ClusterError, match=message):
        parse(TEXT.replace(old, new), "two.toml")


def test_units():
    scales = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "u": 1e-6, "n": 1e-9}
    for units, ends in ((RATES, {"B/s": 1, "b/s": 1 / 8}), (TIMES, {"s": 1}), (FLOPS, {"flop/s": 1})):
        for name, scale in units.items():
            assert any(
                scale == pytest.approx(scales[name.removesuffix(end)] * ends[end]) for end in ends if name.endswith(end)
            )
    assert BYTES == {"GB": 1e9, "GiB": 2**30}


def test_a_whole_cluster_by_hand():
    cluster = parse(TEXT.replace("latency = 1.5,", "latency = 1.5, overhead = 3, routing = 'ecmp', paths = 4,"), "t")
    assert [dataclasses.astuple(level) for level in cluster.levels] == [
        ("nvlink", "switch", 8, pytest.approx(360e9), math.inf, 1e-6, 0, 1, 1, 1, 0, 0, 1),
        ("leaf", "rails", 256, 100e9, math.inf, 2e-6, 1e-6, 1, 1, 1, 0, 0, 1),
        ("spine", "fat_tree", 4096, math.inf, math.inf, 1.5e-6, 3e-6, 1, 1, 2, 4, 0, 1),
    ]
    found = {key: value for key, value in vars(cluster).items() if key not in ("levels", "origins", "compute")}
    assert found == {
        "name": "two levels", "device": "H100", "memory_bytes": math.inf, "memory_bytes_per_s": 3350e9,
        "copy": (0.3e-6, 560e9), "launch_s": 2e-6, "sync_overhead_s": 5e-6, "channels": 32,
        "channel_bytes_per_s": 20.6e9, "ll": None, "faults": (),
    }  # fmt: skip
    assert parse(TEXT, "two.toml").levels[2].overhead_s == 1e-6  # transfers over the spine pass the adapters
    assert cluster.origins["device.hbm"] == "datasheet: a source"
    assert "leaf.overhead: measured: somewhere" in str(cluster)
    assert dataclasses.astuple(cluster.compute)[:4] == (989e12, 0.7, 0.8, 1e-6)
    ll = 'll = 2\nll_overhead = 3\nll_latency = "4 ns"\nlaunch = 2'
    assert parse(TEXT.replace("launch = 2", ll), "t").ll == pytest.approx((3e-6, 2e9, 4e-9))
    flow = parse(TEXT.replace("nics = 2", "flow = 7\nnics = 2").replace('nics = "d', 'flow = "guess"\nnics = "d'), "t")
    assert [level.flow_bytes_per_s for level in flow.levels] == [math.inf, 7e9, 7e9]  # the spine is behind the leaf
    flow = dataclasses.replace(flow, levels=(*flow.levels[:2], dataclasses.replace(flow.levels[2], overhead_s=3e-6)))
    node = (0, 4 * 20.6e9, 1e-6)
    for ranks, network in ((8, node), (256, (1e-6, 7e9, 2e-6)), (512, (3e-6, 7e9, 3.5e-6))):
        links = [link[1:] for link in sim.machine_of(flow.native(4), ranks).links]
        assert links == [(*cluster.copy, 0), node, pytest.approx(network)]


@pytest.mark.parametrize("name", Cluster.names())
def test_clusters_of_the_package(name):
    cluster = Cluster.load(name)
    assert cluster.ranks >= 512
    assert {origin.split(":")[0] for origin in cluster.origins.values()} <= set(ORIGINS)
    figures = [f for level in cluster.levels for f in (level.latency_s, level.overhead_s, level.taper)]
    assert all(math.isfinite(figure) for figure in figures)
    cluster.native()


def test_a_file_and_an_unknown_name(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(TEXT)
    assert Cluster.load(path).name == "two levels"
    with pytest.raises(ClusterError, match="neither a file nor one of dgx-a100"):
        Cluster.load("dgx-h1000")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (8, (8,)), (12, (6, 12)), (64, (8, 64)), (512, (8, 256, 512)), (768, (8, 256, 768)),
        (13, "13 ranks cannot be spread evenly"), (8192, "has 4096 ranks, got 8192"),
    ],
)  # fmt: skip
def test_ranks_are_spread_evenly(ranks, expected):
    cluster = parse(TEXT, "two.toml")
    if isinstance(expected, str):
        with pytest.raises(ClusterError, match=expected):
            cluster.spread(ranks)
    else:
        assert tuple(level.ranks for level in cluster.spread(ranks).levels) == expected
