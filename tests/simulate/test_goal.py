"""goal: schedules of plans, compared with a first-in-first-out model that shares nothing with the engine."""

import collections
import heapq

import jax
import numpy as np
import pytest

from jaxcomm._core import plan
from jaxcomm.simulate import Cluster, collective
from tools.simulator import goal

OVERHEAD_S, LATENCY_S, RATE = 1e-6, 5e-6, 48e9
# Each rank is a node of its own, so all messages pass its adapter.
APART = {
    "nvlink.ranks": "1", "leaf.kind": "fat_tree", "leaf.bandwidth": f"{RATE / 1e9} GB/s", "leaf.efficiency": "1",
    "leaf.overhead": "1 us", "leaf.latency": "5 us", "device.hbm": "1e9 GB/s", "kernel.channel": "1e9 GB/s",
    "kernel.launch": "2 us", "kernel.sync": "5 us",
}  # fmt: skip


def _fifo_s(schedule):
    """The time of a schedule if each rank sends one message after the other, and links are never shared.

    Without the latency of last messages, on which no operation waits.
    """
    ends: dict[tuple[int, int], float] = {}
    free_s = [0.0] * len(schedule)
    arrivals = collections.defaultdict(collections.deque)
    blocked: dict[tuple[int, int, int], collections.deque] = collections.defaultdict(collections.deque)
    users = collections.defaultdict(list)
    missing = {}
    ready: list[tuple[float, int, int]] = []
    for rank, ops in enumerate(schedule):
        for number, op in enumerate(ops):
            missing[rank, number] = len(set(op.requires))
            for other in set(op.requires):
                users[rank, other].append(number)
            if not op.requires:
                heapq.heappush(ready, (0.0, rank, number))
    starts = collections.defaultdict(float)

    def end(rank, number, time_s):
        ends[rank, number] = time_s
        for user in users[rank, number]:
            starts[rank, user] = max(starts[rank, user], time_s)
            missing[rank, user] -= 1
            if missing[rank, user] == 0:
                heapq.heappush(ready, (starts[rank, user], rank, user))

    while ready:
        now_s, rank, number = heapq.heappop(ready)
        op = schedule[rank][number]
        if op.kind == "calc":
            end(rank, number, now_s + op.size * 1e-9)
        elif op.kind == "send":
            free_s[rank] = max(free_s[rank], now_s) + OVERHEAD_S + op.size / RATE
            end(rank, number, now_s)
            key = (rank, op.peer, op.tag)
            if blocked[key]:
                other, since_s = blocked[key].popleft()
                end(op.peer, other, max(since_s, free_s[rank] + LATENCY_S))
            else:
                arrivals[key].append(free_s[rank] + LATENCY_S)
        else:
            key = (op.peer, rank, op.tag)
            if arrivals[key]:
                end(rank, number, max(now_s, arrivals[key].popleft()))
            else:
                blocked[key].append((number, now_s))
    assert len(ends) == sum(map(len, schedule)), "a message that is never sent, or a cycle"
    last = {(r, number) for r, ops in enumerate(schedule) for number, op in enumerate(ops) if op.kind == "recv"}
    last = {(r, number) for r, number in last if not schedule[r][number].requires and not users[r, number]}
    return max(*free_s, *(time_s for key, time_s in ends.items() if key not in last))


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [
        ("psum", "ring"),
        ("psum", "recursive_doubling"),
        ("all_gather", "ring"),
        ("all_gather", "recursive_doubling"),
        ("psum_scatter", "ring"),
        ("all_to_all", "pairwise"),
        ("all_to_all", "direct"),
    ],
)
@pytest.mark.parametrize("num_bytes", [1 << 10, 8 << 20])
def test_the_engine_takes_the_time_of_the_schedule(op, algorithm, num_bytes):
    """Where no two ranks send to one rank at once. The engine adds the start and the latency of a last message."""
    x, apart = jax.ShapeDtypeStruct((num_bytes // 4,), np.float32), Cluster.load("dgx-h100", APART)
    found = collective(op, x, 8, cluster=apart, algorithm=algorithm, fidelity="full")
    schedule = goal.of(op, x, 8, cluster=apart, algorithm=algorithm)
    assert found.time_s - 7e-6 - LATENCY_S == pytest.approx(_fifo_s(schedule), rel=1e-4, abs=5e-9)


def test_clusters_without_faults_have_schedules():
    x = jax.ShapeDtypeStruct((16 << 10,), np.float32)
    schedule = goal.of("all_gather", x, 8, cluster=Cluster.load("dgx-h100"), algorithm="ring")
    assert [sum(op.size for op in ops if op.kind == "recv" and op.size > 1) for ops in schedule] == [7 * 64 << 10] * 8
    with pytest.raises(ValueError, match="a schedule has no faults, got nvlink"):
        goal.of("all_gather", x, 8, cluster=Cluster.load("dgx-h100", {"fault.nvlink[3]": "0.5"}))


def _plan(rank, steps):
    made = plan.Plan()
    made.rank, made.num_ranks = rank, 2
    made.steps = steps
    return made


def _step(kind, peer, count=0):
    made = plan.Step()
    made.kind, made.peer, made.count = kind, peer, count
    return made


def test_steps_of_two_ranks_become_messages():
    """Rank 0 puts 8 elements and signals; rank 1 waits and reads 3 elements of rank 0."""
    put = _plan(0, [_step("put", 1, 8), _step("signal", 1)])
    get = _plan(1, [_step("wait", 0), _step("get", 0, 3)])
    op = goal.Op
    assert goal.schedule([put, get], 4, (0.0, 1e9)) == [
        [op("send", 32, 1, 1), op("send", 1, 1, 0, (0,)), op("recv", 1, 1, 1), op("send", 12, 1, 2, (2,))],
        [op("recv", 32, 0, 1), op("recv", 1, 0, 0, (0,)), op("send", 1, 0, 1, (1,)), op("recv", 12, 0, 2, (2,))],
    ]
