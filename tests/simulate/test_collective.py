"""collective(): times on clusters, from the plans that jaxcomm executes."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

from jaxcomm.simulate import Cluster, collective
from jaxcomm.simulate.collectives import _limits


def _operand(num_bytes):
    return jax.ShapeDtypeStruct((num_bytes // 4,), np.float32)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_large_exchange_in_a_domain_takes_the_time_in_the_reason(symmetric):
    """Staged: tests/test_explain.py has that time by hand. In place: one copy, then n - 1 transfers of 512 KiB each."""
    block = 16 << 20
    cluster = dataclasses.replace(Cluster.load("dgx-h100"), memory_bytes=8 * block)  # which is enough
    found = collective("all_to_all", _operand(8 * block), 8, cluster=cluster, symmetric_buffers=symmetric)
    assert found.algorithm == "direct" and found.channels == 32
    in_reason = float(re.search(r"direct ([\d.]+) us", found.reason)[1]) * 1e-6
    assert found.time_s == pytest.approx(in_reason, abs=0.1e-6)
    overhead_s, copy = cluster.copy
    in_place = 2.2e-6 + 5e-6 + overhead_s + block / copy + 7 * (0.5e-6 + block / 351e9)
    assert (found.time_s == pytest.approx(in_place)) == symmetric
    assert found.bound_beta_s == pytest.approx(7 * block / (450e9 * 0.78))
    assert found.bottleneck.startswith("nvlink") and found.why.startswith("nvlink")
    assert found.interval[0] < found.time_s < found.interval[1]
    assert found.origins == collections.Counter(origin.split(":")[0] for origin in cluster.origins.values())
    lines = str(found).splitlines()
    assert f"algorithm   direct, 32 channel(s): {found.reason}" in lines and "no measurement of jaxcomm" in lines[-1]
    assert f"  {'nvlink in':24} busy {7 * block / (450e9 * 0.78) / found.time_s:6.1%}" in lines


@pytest.mark.parametrize("op", ["psum", "all_to_all", "all_gather"])
def test_beyond_max_steps_bounds_and_time_stay(op):
    """All channels together send the bytes of the call once."""
    cluster, x = Cluster.load("dgx-h100"), _operand(64 << 20)
    full, modelled = (collective(op, x, 16, cluster=cluster, max_steps=most) for most in (None, 1))
    assert full.channels > 1 and modelled.steps == 0
    assert modelled.bound_beta_s == pytest.approx(full.bound_beta_s, rel=0.1)
    assert modelled.time_s == pytest.approx(full.time_s, rel=0.1)
    assert modelled.bound_alpha_s == collective(op, x, 16, cluster=cluster, fidelity="bounds").bound_alpha_s > 0
    assert modelled.why.startswith("cost model, in which transfers do not share links: ")
    assert [collective("ppermute", x, 16, cluster=cluster, max_steps=n).steps for n in (8, 7)] == [8, 0]
    shared = collective(op, x, 512, cluster=Cluster.load("dgx-h100-taper4"), max_steps=1)
    assert shared.time_s >= shared.bound_beta_s


def test_what_limits_a_time():
    for alpha_s, beta_s, link, why in (
        (5, 5, "leaf in", "leaf in: bytes on leaf in 50%"),
        (6, 5.5, "leaf in", "latency and overhead of dependent steps: bytes on leaf in 55%"),
        (4, 3, "leaf in", "neither alone: bytes on leaf in 30%"),
        (9, 0, "", "latency and overhead of dependent steps: bytes on no link 0%"),
    ):
        whole = f"{why} of the time, dependent steps {alpha_s}0%"
        assert _limits(10, alpha_s, beta_s, link)["why"] == whole


def test_a_ragged_exchange_moves_each_byte_once():
    """Equal slices in a domain, by 31 thread blocks: a copy of the own slice, n - 1 transfers, a copy of the result."""
    cluster = Cluster.load("dgx-h100")
    size = 8 * 64 << 20
    found = collective("ragged_all_to_all", _operand(size), 8, cluster=cluster, algorithm="direct")
    block = size / 8
    assert found.bytes == size and found.channels == 31
    assert found.bound_beta_s == pytest.approx(7 * block / (450e9 * 0.78), rel=1e-4)
    assert found.time_s == pytest.approx((size + block) / cluster.copy[1] + found.bound_beta_s, rel=0.01)


def test_taper_slows_what_crosses_the_spine_only():
    """all_to_all between 64 domains needs (n - 256) m taper / beta; one domain needs no spine."""
    bounds, block_s = [], (1 << 20) / (50e9 * 0.97)
    for name in ("dgx-h100", "dgx-h100-taper2", "dgx-h100-taper4"):
        cluster = Cluster.load(name)
        least = collective("all_to_all", _operand(512 << 20), 512, cluster=cluster, fidelity="bounds")
        assert least.time_s is None
        bounds.append(least.bound_beta_s)
        assert "spine" not in " ".join(collective("all_to_all", _operand(1 << 20), 8, cluster=cluster).utilisation)
    assert bounds == pytest.approx([(512 - 8) * block_s, 256 * block_s * 2, 256 * block_s * 4])
    assert least.bound_alpha_s == pytest.approx(sum(level.latency_s for level in cluster.levels[1:]))
    into_second = [(rank, rank + 8) for rank in range(6)]
    rank_s = (1 << 20) / (50e9 * 0.97 + 450e9 * 0.78)  # over all links of a rank
    for perm, bound_s, name in ((into_second, 6 / 8 * block_s, "leaf in"), ([(0, 1)], rank_s, "nvlink in")):
        least = collective("ppermute", _operand(1 << 20), 24, cluster=cluster, perm=perm, fidelity="bounds")
        assert (least.bound_beta_s, least.bottleneck) == (pytest.approx(bound_s), name)


@pytest.mark.parametrize("op", ["psum", "all_gather", "psum_scatter", "pbroadcast", "ppermute", "barrier"])
def test_folded_is_full(op):
    cluster = Cluster.load("gb200-nvl72")
    x = _operand(4 * 144 * 32 * 40)  # 32 thread blocks, and equal pieces, which folding would round up to
    folded, full = (collective(op, x, 144, cluster=cluster, fidelity=f) for f in ("folded", "full"))
    assert folded.time_s == pytest.approx(full.time_s, rel=1e-9)
    assert folded.ranks_simulated <= full.ranks_simulated
    if op in ("pbroadcast", "ppermute"):  # one pair of ranks between domains, or a chain from the middle
        to = [rank // 72 * 72 + (rank + 1) % 72 for rank in range(144)]
        to[20], to[99] = to[99], to[20]
        more = {"perm": list(enumerate(to))} if op == "ppermute" else {"source": 77, "algorithm": "ring"}
        times = [collective(op, x, 144, cluster=cluster, fidelity=f, **more).time_s for f in ("folded", "full")]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
    if op == "ppermute":
        pairs = {"cluster": Cluster.load("dgx-h100"), "perm": [(0, 1), (2, 3)]}  # of 8 ranks: unequal roles
        waits = [collective(op, _operand(64 << 20), 8, fidelity=f, **pairs).wait_s for f in ("folded", "full")]
        assert waits[0] == pytest.approx(waits[1], rel=1e-9) and waits[0] > 0


BROKEN = {"cluster": Cluster.load("dgx-h100", {"fault.leaf[3]": "0.5"})}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "sum"}, "op must be one of"),
        ({"algorithm": "xla"}, "has no plan"),
        ({"algorithm": "nope"}, "unknown algorithm"),
        ({"fidelity": "exact"}, "fidelity must be one of bounds, folded, full"),
        ({"axis_sizes": (2, 0)}, "axis_sizes must be positive"),
        ({"op": "all_to_all", "axis_sizes": 3}, "cannot be split into 3 equal blocks"),
        ({"op": "ppermute", "perm": [(0, -1)]}, "ppermute: perm must have destinations from 0 to 7"),
        ({"axis_sizes": 131071}, "cannot be spread evenly"),
        (
            BROKEN | {"axis_sizes": 16, "max_steps": 1},
            "more than 1 steps of 16 .*; the faults leave few ranks",
        ),
        (
            BROKEN | {"axis_sizes": 2048, "algorithm": "ring"},
            "more than 1000000 steps of 2048 .*; the faults",
        ),
        ({"axis_sizes": 999983}, "has 131072 ranks, got 999983"),
    ],
)
def test_bad_arguments(arguments, message):
    call = {"op": "psum", "x": _operand(256), "axis_sizes": 8, "cluster": Cluster.load("dgx-h100")} | arguments
    with pytest.raises(ValueError, match=message):
        collective(call.pop("op"), call.pop("x"), call.pop("axis_sizes"), **call)
