"""goal: schedules of plans."""

import jax
import numpy as np
import pytest

from jaxcomm._core import plan
from jaxcomm.simulate import Cluster
from tools.simulator import goal


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
