"""Permutations on random clusters with faults, against a simulation of max-min fair rates, event by event.

A rank reads from a rank of its domain, then puts to a rank of another one, so every number of the result follows from
the links of each transfer.
"""

import collections
import random

import jax
import numpy as np
import pytest

from jaxcomm.simulate import Cluster, Level, collective
from jaxcomm.simulate.cluster.faults import Fault

BYTES = 4 << 20
X = jax.ShapeDtypeStruct((BYTES // 4,), np.float32)
Transfer = collections.namedtuple("Transfer", "links limit overhead_s")


def _cluster(draw):
    """Domains, leaves and up to two spines, or fewer levels; with slow ranks, degraded links and lost adapters."""
    rates = lambda count: [draw.choice([1e9, 2e9, 3e9, 5e9]) for _ in range(count)]  # noqa: E731
    times = lambda count: [draw.randrange(9) * 1e-6 for _ in range(count)]  # noqa: E731
    ranks = np.cumprod(draw.choices([2, 3], k=draw.choice([1, 2, 2, 3, 3, 4]))).tolist()
    kind, n, faults = draw.choice(["switch", "rails", "rails", "fat_tree"]), ranks[-1], []
    levels = [Level("a", "switch", ranks[0], *rates(2), *times(2))]
    levels += [Level("b", kind, size, *rates(1), np.inf, *times(2)) for size in ranks[1:2]]
    for name, size in zip("cd", ranks[2:], strict=False):
        levels.append(Level(name, "fat_tree", size, np.inf, np.inf, *times(2), taper=draw.choice([0.5, 1, 4])))
    if draw.randrange(3):
        faults += [
            Fault(index=rank, slow=slow) for rank, slow in zip(draw.sample(range(n), 2), (2.0, 3.0), strict=True)
        ]
        for number, level in enumerate(levels):
            count = n if number < 2 else n // ranks[number - 1] * (ranks[0] if kind == "rails" and number == 2 else 1)
            for index in draw.sample(range(count), 2):
                ways = draw.choice([(True, True), (True, False), (False, True)])
                faults.append(Fault(level.name, index, *ways, draw.choice([0.1, 0.5, 0.7])))
        loses = draw.randrange(2) or (kind == "rails" and len(levels) == 2)  # where transfers change rails
        lost = draw.sample(range(n), (ranks[0] - 1) * loses if len(levels) > 1 else 0)
        faults = [fault for fault in faults if fault.level != "b" or fault.index not in lost]
        faults += [Fault("b", index, capacity=0.0) for index in lost]
    figures = {"launch_s": 1e-6, "sync_overhead_s": 2e-6, "channel_bytes_per_s": rates(1)[0]}
    figures |= {"copy": (*times(1), *rates(1)), "memory_bytes_per_s": draw.choice([2e9, 9e9])}
    return Cluster("c", "H100", tuple(levels), faults=tuple(faults), **figures)


class _Links:
    def __init__(self, cluster):
        self.cluster, self.levels, self.inner = cluster, cluster.levels, cluster.levels[0].ranks
        self.rails = len(self.levels) > 1 and self.levels[1].kind == "rails"
        self.lost = {fault.index for fault in cluster.faults if fault.capacity == 0}

    def uplink(self, rank, number=2):
        """Of a group below level `number`; with rails, of the rank's switch in a leaf."""
        group = rank // self.levels[number - 1].ranks
        return group * self.inner + rank % self.inner if self.rails and number == 2 else group

    def uplinks(self, src, dst):
        return [i for i in range(2, len(self.levels)) if self.uplink(src, i) != self.uplink(dst, i)]

    def capacity(self, link):
        name, index = link
        if name == "memory":
            return self.cluster.memory_bytes_per_s
        number = "abcd".index(name[0])
        level = self.levels[number]
        rate, leaves = level.bytes_per_s, name[2:] in ("out", "up")
        if number > 1:
            adapters = self.levels[number - 1].ranks // (self.inner if self.rails and number == 2 else 1)
            rate = adapters * self.levels[1].bytes_per_s / level.taper
        for fault in self.cluster.faults:
            if (fault.level, fault.index) == (name[0], index) and (fault.out if leaves else fault.inward):
                rate *= fault.capacity
        return rate

    def relays(self, src, dst):
        """The next rail without a lost adapter in both domains; else the first adapters that are left."""
        first = [rank // self.inner * self.inner for rank in (src, dst)]
        changed = {first[0] + dst % self.inner} if self.rails and len(self.levels) == 2 else set()
        if not {src, dst, *changed} & self.lost:
            return src, dst
        for i in range(1, self.inner + 1):
            local = (max(src % self.inner, dst % self.inner) + i) % self.inner
            if not {first[0] + local, first[1] + local} & self.lost:
                return first[0] + local, first[1] + local
        return tuple(next(rank for rank in range(at, at + self.inner) if rank not in self.lost) for at in first)

    def between(self, src, dst):
        if src // self.inner == dst // self.inner:
            return ([("a out", src), ("a in", dst)] if src != dst else []), 0
        out, into = self.relays(src, dst)
        latency_s = self.levels[1].latency_s + sum(self.levels[i].latency_s for i in self.uplinks(src, dst))
        hops = [(src, out), (into, dst)]
        if self.rails and len(self.levels) == 2 and out % self.inner != into % self.inner:  # change rails first
            hops.append((out, out := out // self.inner * self.inner + into % self.inner))
        links = [("b out", out), ("b in", into)]
        for i in self.uplinks(out, into):
            links += [(f"{'abcd'[i]} up", self.uplink(out, i)), (f"{'abcd'[i]} down", self.uplink(into, i))]
        for one, other in [hop for hop in hops if hop[0] != hop[1]]:
            links += [("a out", one), ("a in", other)]
            latency_s += self.levels[0].latency_s
        return links, latency_s


def _rates(transfers, capacity):
    """All rates rise together until a limit or a full link stops them."""
    rates, rising = [0.0] * len(transfers), set(range(len(transfers)))
    while rising:
        free = {}
        for link in {link for i in rising for link in transfers[i].links}:
            used = sum(rates[i] * t.links[link] for i, t in enumerate(transfers) if i not in rising)
            free[link] = (capacity[link] - used) / sum(transfers[i].links[link] for i in rising)
        most = {i: min([transfers[i].limit, *map(free.get, transfers[i].links)]) for i in rising}
        for i in [i for i in rising if most[i] <= min(most.values()) * (1 + 1e-9)]:
            rates[i] = min(most.values())
            rising.remove(i)
    return rates


def _ends(programs, capacity):
    """When each rank has done its transfers, one after the other."""
    now, left, ends, done = 0.0, {}, [0.0] * len(programs), [0] * len(programs)
    starts = {rank: program[0].overhead_s for rank, program in enumerate(programs) if program}
    while starts or left:
        rates = dict(zip(left, _rates([programs[rank][done[rank]] for rank in left], capacity), strict=True))
        finish = {rank: now + size / rates[rank] for rank, size in left.items()}
        now, before = min([*starts.values(), *finish.values()]), now
        left = {rank: size - rates[rank] * (now - before) for rank, size in left.items()}
        for rank in [rank for rank, at in finish.items() if at <= now * (1 + 1e-12)]:
            del left[rank]
            done[rank], ends[rank] = done[rank] + 1, now
            if done[rank] < len(programs[rank]):
                starts[rank] = now + programs[rank][done[rank]].overhead_s
        for rank in [rank for rank, at in starts.items() if at <= now]:
            del starts[rank]
            left[rank] = BYTES
    return max(ends)


@pytest.mark.parametrize("seed", range(12))
def test_permutations_share_links_fairly(seed):
    draw = random.Random(seed)
    for _ in range(12):
        cluster = _cluster(draw)
        levels, n, links, loads = cluster.levels, cluster.ranks, _Links(cluster), collections.Counter()
        to, programs = draw.sample(range(n), n), [[] for _ in range(n)]
        for own in range(n):
            slow = max([1, *(fault.slow for fault in cluster.faults if (fault.level, fault.index) == ("", own))])
            for src, dst, level in ((to.index(own), own, 0), (own, to[own], 1)):
                if (src // links.inner == dst // links.inner) != (level == 0):
                    continue
                inside = min(cluster.channel_bytes_per_s, levels[0].flow_bytes_per_s)
                limit = levels[1].bytes_per_s if level else inside
                while src // levels[level].ranks != dst // levels[level].ranks:
                    level += 1
                overhead_s, limit = (levels[level].overhead_s, limit) if src != dst else cluster.copy
                passed = collections.Counter([*links.between(src, dst)[0], ("memory", src), ("memory", dst)])
                programs[own].append(Transfer(passed, limit / slow, overhead_s * slow))
                loads.update(passed)
        last_s = links.between(0, n - 1)[1]
        time_s = 3e-6 + _ends(programs, {link: links.capacity(link) for link in loads}) + last_s
        alpha_s = max(sum(t.overhead_s for t in program) for program in programs) + last_s
        busy = collections.defaultdict(float)
        for link, count in loads.items():
            busy[link[0]] = max(busy[link[0]], count * BYTES / links.capacity(link))
        for fidelity in ("full", "folded"):
            options = {"algorithm": "direct", "fidelity": fidelity, "symmetric_buffers": True}
            found = collective("ppermute", X, n, cluster=cluster, perm=list(enumerate(to)), **options)
            assert found.utilisation == pytest.approx({name: s / found.time_s for name, s in busy.items()}, rel=1e-6)
            times = found.time_s, found.bound_alpha_s, found.bound_beta_s, busy[found.bottleneck]
            assert times == pytest.approx((time_s, alpha_s, max(busy.values()), max(busy.values())), rel=1e-6)
            assert (found.ranks, found.bytes, found.wait_s) == (n, BYTES, 0)
            assert (found.ranks_simulated, found.steps) == (n, sum(map(len, programs))) or fidelity == "folded"
