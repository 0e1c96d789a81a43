"""Permutations on random clusters with faults, against a simulation of max-min fair rates, event by event.

A rank reads from a rank of its domain, then puts to a rank of another one, so every number of the result follows from
the links of each transfer.
"""

import collections
import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxcomm.simulate import Cluster, Level, collective
from jaxcomm.simulate.cluster.faults import Fault

BYTES = 4 << 20


def _cluster(draw):
    """Domains, leaves and a spine, or fewer levels; with slow ranks, degraded links and lost adapters."""
    rate = lambda: draw.choice([1e9, 2e9, 3e9, 5e9])  # noqa: E731
    sizes = [draw.choice([2, 3]), draw.choice([2, 3]), draw.choice([2, 3])][: draw.choice([1, 2, 2, 3, 3])]
    ranks = np.cumprod(sizes).tolist()
    kinds = ["switch", draw.choice(["switch", "rails", "fat_tree"]), draw.choice(["switch", "fat_tree"])]
    levels = [
        Level(name, kind, n, rate(), latency_s=draw.randrange(9) * 1e-6, overhead_s=draw.randrange(9) * 1e-6)
        for name, kind, n in zip(("a", "b", "c"), kinds, ranks, strict=False)
    ]
    levels[0] = dataclasses.replace(levels[0], flow_bytes_per_s=rate())
    levels[2:] = [Level("c", level.kind, level.ranks, taper=draw.choice([0.5, 1, 4])) for level in levels[2:]]
    n, faults = ranks[-1], []
    if draw.randrange(3):
        faults += [Fault(index=rank, slow=draw.choice([2.0, 3.0])) for rank in draw.sample(range(n), 2)]
        for level in range(len(sizes)):
            links = n if level < 2 else n // ranks[1] * (ranks[0] if kinds[1] == "rails" else 1)
            for index in draw.sample(range(links), 2):
                ways = draw.choice([(True, True), (True, False), (False, True)])
                faults.append(Fault(levels[level].name, index, *ways, draw.choice([0.1, 0.5, 0.7])))
        if len(sizes) > 1 and draw.randrange(2):  # at most one less than a domain has
            lost = draw.sample(range(n), ranks[0] - 1)
            faults = [f for f in faults if f.level != "b" or f.index not in lost]
            faults += [Fault("b", index, capacity=0.0) for index in lost]
    return Cluster(
        "c", "H100", tuple(levels), copy=(draw.randrange(9) * 1e-6, rate()), memory_bytes_per_s=draw.choice([2e9, 9e9]),
        launch_s=1e-6, sync_overhead_s=2e-6, channel_bytes_per_s=rate(), faults=tuple(faults),
    )  # fmt: skip


class _Links:
    """The links of a cluster: their names, and which of them a transfer passes."""

    def __init__(self, cluster):
        self.levels, self.inner = cluster.levels, cluster.levels[0].ranks
        self.rails = len(self.levels) > 1 and self.levels[1].kind == "rails"
        self.memory = cluster.memory_bytes_per_s
        self.lost = {f.index for f in cluster.faults if f.capacity == 0}
        self.left = {}
        for f in cluster.faults:
            number = "abc".find(f.level or "-")
            for way in [name for name, on in zip(("out", "in"), (f.out, f.inward), strict=True) if on and number >= 0]:
                way = way if number < 2 else {"out": "up", "in": "down"}[way]
                self.left[f"{f.level} {way}", f.index] = f.capacity

    def uplink(self, rank):
        """Of a leaf; with rails, of the rank's switch in it."""
        leaf = rank // self.levels[1].ranks
        return leaf * self.inner + rank % self.inner if self.rails else leaf

    def capacity(self, link):
        name, _ = link
        if name == "memory":
            return self.memory
        below = self.levels[1].ranks // (self.inner if self.rails else 1) if name[0] == "c" else 1
        level = self.levels["abc".index(name[0])]
        rate = below * self.levels[1].bytes_per_s / level.taper if name[0] == "c" else level.bytes_per_s
        return rate * self.left.get(link, 1)

    def relays(self, src, dst):
        """The next rail without a lost adapter in both domains; else the first adapters that are left."""
        first = [rank // self.inner * self.inner for rank in (src, dst)]
        passed = {src, dst}
        if self.rails and len(self.levels) == 2:
            passed.add(first[0] + dst % self.inner)
        if not passed & self.lost:
            return src, dst
        for i in range(1, self.inner + 1):
            local = (max(src % self.inner, dst % self.inner) + i) % self.inner
            if not {first[0] + local, first[1] + local} & self.lost:
                return first[0] + local, first[1] + local
        return tuple(next(rank for rank in range(at, at + self.inner) if rank not in self.lost) for at in first)

    def between(self, src, dst):
        """Links, and latency."""
        if src // self.inner == dst // self.inner:
            return ([("a out", src), ("a in", dst)] if src != dst else []), self.levels[0].latency_s
        out, into = self.relays(src, dst)
        latency_s = self.levels[1].latency_s
        if len(self.levels) > 2 and self.uplink(src) != self.uplink(dst):
            latency_s += self.levels[2].latency_s
        sides = [(src, out), (into, dst)]
        if self.rails and len(self.levels) == 2 and out % self.inner != into % self.inner:  # change rails first
            sides.append((out, out := out // self.inner * self.inner + into % self.inner))
        links = [("b out", out), ("b in", into)]
        if len(self.levels) > 2 and self.uplink(out) != self.uplink(into):
            links += [("c up", self.uplink(out)), ("c down", self.uplink(into))]
        for one, other in sides:
            if one != other:
                links += [("a out", one), ("a in", other)]
                latency_s += self.levels[0].latency_s
        return links, latency_s


def _rates(transfers, capacity):
    """All rates rise together until a limit or a full link stops them."""
    rates, rising = [0.0] * len(transfers), set(range(len(transfers)))
    while rising:
        free = {
            link: (room - sum(rates[i] * t.links[link] for i, t in enumerate(transfers) if i not in rising))
            / sum(t.links[link] for i, t in enumerate(transfers) if i in rising)
            for link, room in capacity.items()
            if any(transfers[i].links[link] for i in rising)
        }
        most = {i: min([transfers[i].limit, *(free[link] for link in transfers[i].links)]) for i in rising}
        level = min(most.values())
        for i in [i for i in rising if most[i] <= level * (1 + 1e-9)]:
            rates[i] = level
            rising.remove(i)
    return rates


class _Transfer:
    def __init__(self, links, limit, overhead_s):
        self.links, self.limit, self.overhead_s = collections.Counter(links), limit, overhead_s


def _ends(programs, capacity):
    """When each rank has done its transfers, one after the other."""
    now, active = 0.0, {}  # bytes left by rank
    starts = {rank: program[0].overhead_s for rank, program in enumerate(programs) if program}
    ends, done = [0.0] * len(programs), [0] * len(programs)
    while starts or active:
        order = list(active)
        rates = dict(zip(order, _rates([programs[r][done[r]] for r in order], capacity), strict=True))
        finish = {rank: now + active[rank] / rates[rank] for rank in order}
        then = min([*starts.values(), *finish.values()])
        active = {rank: left - rates[rank] * (then - now) for rank, left in active.items()}
        now = then
        for rank in [rank for rank, at in finish.items() if at <= now * (1 + 1e-12)]:
            del active[rank]
            done[rank], ends[rank] = done[rank] + 1, now
            if done[rank] < len(programs[rank]):
                starts[rank] = now + programs[rank][done[rank]].overhead_s
        for rank in [rank for rank, at in starts.items() if at <= now]:
            del starts[rank]
            active[rank] = BYTES
    return ends


@pytest.mark.parametrize("seed", range(8))
def test_permutations_share_links_fairly(seed):
    draw = random.Random(seed)
    for _ in range(12):
        cluster = _cluster(draw)
        n, links, size = cluster.ranks, _Links(cluster), cluster.levels[min(1, len(cluster.levels) - 1)].ranks
        slow = {f.index: f.slow for f in cluster.faults if not f.level}
        to, limits = draw.sample(range(n), n), (cluster.channel_bytes_per_s, cluster.levels[0].flow_bytes_per_s)
        programs, capacity, loads = [[] for _ in range(n)], {}, collections.Counter()
        for own in range(n):
            reads, puts = (to.index(own), own), (own, to[own])
            for (src, dst), read in ((reads, True), (puts, False)):
                if (src // links.inner == dst // links.inner) != read:
                    continue
                number = 0 if read else 1 + (len(cluster.levels) > 2 and src // size != dst // size)
                limit = min(limits) if read else cluster.levels[1].bytes_per_s
                overhead_s, limit = (cluster.levels[number].overhead_s, limit) if src != dst else cluster.copy
                passed = [*links.between(src, dst)[0], ("memory", src), ("memory", dst)]
                capacity |= {link: links.capacity(link) for link in passed}
                loads.update(passed)
                programs[own].append(_Transfer(passed, limit / slow.get(own, 1), overhead_s * slow.get(own, 1)))
        last_s = links.between(0, n - 1)[1] if len(cluster.levels) > 1 else 0
        time_s = 3e-6 + max(_ends(programs, capacity)) + last_s
        alpha_s = max(sum(t.overhead_s for t in program) for program in programs) + last_s
        busy = {}
        for link, count in loads.items():
            busy[link[0]] = max(busy.get(link[0], 0), count * BYTES / capacity[link])
        for fidelity in ("full", "folded"):
            found = collective(
                "ppermute", jax.ShapeDtypeStruct((BYTES // 4,), np.float32), n, cluster=cluster, algorithm="direct",
                perm=list(enumerate(to)), fidelity=fidelity, symmetric_buffers=True,
            )  # fmt: skip
            assert found.time_s == pytest.approx(time_s, rel=1e-6)
            shares = {name: busy_s / time_s for name, busy_s in busy.items()}
            assert found.utilisation == pytest.approx(shares, rel=1e-6)
            assert (found.bound_alpha_s, found.bound_beta_s) == pytest.approx((alpha_s, max(busy.values())), rel=1e-6)
            assert busy[found.bottleneck] == pytest.approx(found.bound_beta_s)
            assert (found.ranks, found.bytes, found.wait_s) == (n, BYTES, 0)
            assert (found.ranks_simulated, found.steps) == (n, sum(map(len, programs))) or fidelity == "folded"
