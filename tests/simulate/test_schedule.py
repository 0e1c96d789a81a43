"""Two streams: times of small programs that can be drawn by hand."""

import functools
import itertools
import random

import pytest

from jaxcomm.simulate.step.schedule import execute
from jaxcomm.simulate.step.tasks import Block, Exchange, Kernel, Loop, Task


def _kernel(seconds, *needs):
    return Task(Kernel("k", seconds, 0, "", ""), needs)


def _exchange(seconds, *needs, asynchronous=True):
    return Task(Exchange("psum", ("d",), seconds, "f", "", asynchronous), needs)


def _run(*tasks):
    return execute(Block(tasks), lambda work: work.flops if isinstance(work, Kernel) else work.count)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        # Kernels 0-3 and 3-5; a collective 0-4. The last kernel needs all: 5-6.
        ([_kernel(3), _exchange(4), _kernel(2), _kernel(1, 0, 1, 2)],
         {"time_s": 6, "compute_s": 6, "communication_s": 4, "exposed_s": 0, "path_s": 5, "least_s": 6,
          "serial_s": 10}),
        # Kernel 0-3, its collective 3-7, a kernel beside it 3-4, the user 7-8: three seconds of the collective alone.
        ([_kernel(3), _exchange(4, 0), _kernel(1), _kernel(1, 1)], {"time_s": 8, "exposed_s": 3, "path_s": 8}),
        # Kernel 0-3, synchronous collective 3-7, then the independent kernel 7-8 and the user 8-9.
        ([_kernel(3), _exchange(4, 0, asynchronous=False), _kernel(1), _kernel(1, 1)],
         {"time_s": 9, "exposed_s": 4, "serial_s": 9, "path_s": 8}),
        # An asynchronous collective runs 0-5. The synchronous one, ready at 1, waits for it; the last one comes after.
        ([_exchange(5), _kernel(1), _exchange(2, 1, asynchronous=False), _exchange(1)],
         {"spans": [(0, 5), (0, 1), (5, 7), (7, 8)]}),
    ],
)  # fmt: skip
def test_times_of_two_streams(tasks, expected):
    found = _run(*tasks)
    spans = [(run.start_s, run.end_s) for run in found.runs]
    assert {key: spans if key == "spans" else getattr(found, key) for key in expected} == expected


def test_collectives_start_in_the_order_in_which_they_are_ready():
    """As gradients of a backward pass: the last layer's are there first, but the first layer's come first in a tree."""
    found = _run(_kernel(1), _kernel(1, 0), _kernel(1, 1), _exchange(2, 2), _exchange(2, 1), _exchange(2, 0))
    starts = {run.task.needs: run.start_s for run in found.runs if isinstance(run.task.work, Exchange)}
    assert starts == {(0,): 1, (1,): 3, (2,): 5}
    assert (found.time_s, found.exposed_s) == (7, 4)


def test_a_loop_repeats_its_body_without_overlap():
    """Five times 3 s + 4 s, with 1 s of each collective beside a kernel; and of two branches the slower one."""
    body = Block((_kernel(3), _exchange(4, 0), _kernel(1)))
    found = _run(Task(Loop("scan", (body,), 5, ""), ()), _exchange(1))
    assert (found.time_s, found.compute_s, found.communication_s) == (35 + 1, 20, 21)
    assert found.exposed_s == 5 * 3 + 1
    assert found.path_s == 35
    apart = _run(Task(Loop("scan", (Block((_kernel(3), _exchange(4, asynchronous=False))),), 5, ""), ()))
    assert (apart.time_s, apart.path_s, apart.least_s) == (35, 20, 20)
    slower = _run(Task(Loop("cond", (Block((_kernel(2),)), body), 1, ""), ()))
    assert slower.time_s == 7
    assert [times for _, times in found.leaves()] == [5, 5, 5, 1]
    nested = _run(Task(Loop("scan", (Block((Task(Loop("scan", (body,), 5, ""), ()),)),), 3, ""), ()))
    assert [times for _, times in nested.leaves()] == [15, 15, 15]


@pytest.mark.parametrize("seed", range(20))
def test_no_order_beats_the_lower_bound_and_none_is_slower_than_serial(seed):
    """Greedy schedules are within the sum of both streams (Graham)."""
    make = random.Random(seed)
    tasks = []
    for index in range(40):
        needs = tuple(sorted(make.sample(range(index), min(index, make.randrange(1 + seed % 3)))))
        kind = make.choice([_kernel, _exchange] * (1 + seed % 4) + [functools.partial(_exchange, asynchronous=False)])
        tasks.append(kind(make.randrange(5), *needs))
    found = _run(*tasks)
    assert found.least_s <= found.time_s <= found.serial_s
    paths = []  # the longest chain that ends with each task
    for task in tasks:
        length = task.work.flops if isinstance(task.work, Kernel) else task.work.count
        paths.append(length + max((paths[need] for need in task.needs), default=0))
    kernels = [run for run in found.runs if isinstance(run.task.work, Kernel)]
    exchanges = [run for run in found.runs if isinstance(run.task.work, Exchange)]
    busy = [sum(run.end_s - run.start_s for run in runs) for runs in (kernels, exchanges)]
    assert (found.path_s, found.compute_s, found.communication_s, found.serial_s) == (max(paths), *busy, sum(busy))
    hidden = {s for run in kernels for s in range(int(run.start_s), int(run.end_s))}
    alone = [len(set(range(int(run.start_s), int(run.end_s))) - hidden) for run in exchanges]
    assert [run.exposed_s for run in exchanges] == alone and found.exposed_s == sum(alone)
    ends = {id(run.task): run for run in found.runs}
    for task in tasks:
        assert all(ends[id(tasks[need])].end_s <= ends[id(task)].start_s for need in task.needs)
    for runs in (kernels, exchanges):
        spans = sorted((run.start_s, run.end_s) for run in runs)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
