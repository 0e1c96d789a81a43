"""Plans of reshard: correct, with the fewest bytes, and with even loads. The oracle sees the global array only."""

import itertools
import random

import numpy as np
import pytest

from jaxcomm._core import plan


def grid(rng, shape, num_ranks):
    """The boxes of a random sharding: each dimension in equal parts, on some ranks in any order, with replicas."""
    parts = [rng.choice([d for d in range(1, n + 1) if n % d == 0 and d <= num_ranks]) for n in shape]
    while np.prod(parts) > num_ranks:
        parts[rng.randrange(len(parts))] = 1
    pieces = list(itertools.product(*(range(p) for p in parts)))
    replicas = rng.randint(1, num_ranks // len(pieces))
    ranks = rng.sample(range(num_ranks), len(pieces) * replicas)
    steps = [n // p for n, p in zip(shape, parts, strict=True)]
    boxes = [None] * num_ranks
    for rank, piece in zip(ranks, pieces * replicas, strict=True):
        boxes[rank] = [(i * step, (i + 1) * step) for i, step in zip(piece, steps, strict=True)]
    return boxes


def uneven(rng, shape, num_ranks):
    """Boxes that cut any dimension at any places; some overlap, and some are empty."""
    boxes = [[(0, n) for n in shape]]
    while len(boxes) < num_ranks:
        box, d = boxes.pop(rng.randrange(len(boxes))), rng.randrange(len(shape))
        cut = rng.randint(*box[d])
        boxes += [[*box[:d], side, *box[d + 1 :]] for side in ((box[d][0], cut), (cut, box[d][1]))]
    boxes = [[(max(0, begin - rng.randint(0, 1)), end) for begin, end in box] for box in boxes]
    return rng.sample(boxes, num_ranks)


def numbers(boxes, ndim):
    flat = [((0, 1), *box) if box else ((0, 0),) * (ndim + 1) for box in boxes]
    return [number for box in flat for interval in box for number in interval]


def ranges(*intervals):
    return numbers([interval and [interval] for interval in intervals], 1)


def elements(box, shape):
    """The elements of a box, as numbers in the global array."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return set(array[tuple(slice(*interval) for interval in box)].reshape(-1)) if box else set()


def moves(plans):
    """(from, to, elements) of every move between ranks."""
    for p in plans:
        for step in p.steps:
            if step.kind in ("put", "get"):
                yield step.src.rank, step.dst.rank, step.count


@pytest.mark.parametrize("make", [grid, uneven])
@pytest.mark.parametrize("seed", range(60))
def test_plans_are_correct_and_minimal(make, seed):
    rng = random.Random(seed)
    nodes, locals_ = rng.choice([(1, 4), (1, 7), (2, 3), (4, 2), (12, 1)])
    n = nodes * locals_
    shape = tuple(rng.choice([1, 2, 6, 12]) for _ in range(rng.choice([1, 2, 3])))
    source, destination = make(rng, shape, n), make(rng, shape, n)
    scope = "network" if nodes > 1 else rng.choice(["process", "node"])
    request = plan.reshard_request(scope, n, locals_, numbers(source, len(shape)), numbers(destination, len(shape)))
    request.chunk_count = rng.choice([0, 1, 5])
    held, wanted = ([elements(box, shape) for box in boxes] for boxes in (source, destination))
    for algorithm in ("hierarchical", "direct") if plan.supports(request, "hierarchical") else ("direct",):
        assert plan.check(request, algorithm) == ""
        received, sent, crossed = np.zeros(n, int), np.zeros(n, int), np.zeros(nodes, int)
        for origin, target, count in moves(plan.build(request, algorithm)):
            received[target] += count
            sent[origin] += count
            if origin // locals_ != target // locals_:
                crossed[target // locals_] += count
        assert received.tolist() == [len(w - h) for h, w in zip(held, wanted, strict=True)]
        if algorithm == "hierarchical":  # what a node lacks comes once
            of_node = [slice(i * locals_, (i + 1) * locals_) for i in range(nodes)]
            assert crossed.tolist() == [len(set().union(*wanted[s]) - set().union(*held[s])) for s in of_node]
    # The busiest rank sends at most one piece more than its lower bound.
    if nodes == 1:
        owners = {e: [r for r in range(n) if e in held[r]] for w in wanted for e in w}
        demand = {e: sum(e in wanted[r] and e not in held[r] for r in range(n)) for e in owners}
        fixed = [sum(demand[e] for e, of in owners.items() if of == [r]) for r in range(n)]
        holders = sum(map(bool, held))
        bound = max(*fixed, -(-sum(demand.values()) // max(holders, 1)), 1)
        largest = max((count for *_, count in moves(plan.build(request, "direct"))), default=0)
        if request.chunk_count == 0:
            assert sent.max() <= bound + largest


def test_messages_of_a_pair_spread_over_all_rounds():
    """A rank on a node of its own sends six chunks to one rank and two to another, straight into their outputs."""
    request = plan.reshard_request("network", 3, 1, ranges((0, 16), None, None), ranges(None, (0, 12), (12, 16)))
    request.chunk_count = 2
    plans = plan.build(request, "direct")
    puts = [(step.peer, step.count, step.dst.space) for step in plans[0].steps if step.kind == "put"]
    assert puts == [(peer, 2, "output") for peer in (1, 2, 1, 1, 1, 2, 1, 1)]
    assert plans[2].steps == []  # nothing waits for the last messages


@pytest.mark.parametrize(("scope", "kind", "count"), [("network", "put", 8), ("node", "get", 15)])
def test_moves_follow_matchings(scope, kind, count):
    """16 ranks, rows to columns: no two ranks put to one rank, or read from it, at the same place of their order."""
    rows, columns = ([[(r, r + 1), (0, 16)] for r in range(16)], [[(0, 16), (r, r + 1)] for r in range(16)])
    request = plan.reshard_request(scope, 16, 8 if scope == "network" else 16, numbers(rows, 2), numbers(columns, 2))
    plans = plan.build(request, "direct")
    peers = [[step.peer for step in p.steps if step.kind == kind] for p in plans]
    assert [len(set(row)) for row in zip(*peers, strict=True)] == [16] * count
    # Messages to other nodes are on their way while a rank reads from its own one.
    assert all(next(step.kind for step in p.steps if step.peer >= 0) == kind for p in plans)


def test_ranks_of_a_node_share_what_it_receives_and_sends():
    """Two ranks of the first node want all, or have all, of a half and two quarters: each moves a half."""
    node, others = ranges((0, 32), (0, 32), *[None] * 4), ranges(None, None, (0, 16), (16, 24), (24, 32), None)
    for boxes in ((others, node), (node, others)):
        request = plan.reshard_request("network", 6, 2, *boxes)
        moved = [0, 0]
        for origin, target, count in moves(plan.build(request, "hierarchical")):
            if origin // 2 != target // 2:
                moved[min(origin, target)] += count
        assert moved == [16, 16]


REPLICAS = {  # sources, destinations, and what the first ranks send
    "equally many elements, not pieces": (
        [(0, 16), (0, 16), *[None] * 5], [None, None, (0, 8), *((i, i + 2) for i in range(8, 16, 2))], [8, 8],
    ),
    "what only one rank has comes first, even if smaller": ([(0, 15), (0, 8), None], [None, None, (0, 15)], [7, 8]),
    "the next rank of two": ([(0, 8), None, (0, 8), None], [None, (0, 8), None, None], [0, 0, 8]),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLICAS)
def test_replicas_share_what_they_send(case):
    source, destination, sent = REPLICAS[case]
    for scope, locals_, algorithm in (
        ("node", len(source), "direct"),
        ("network", 1, "direct"),
        ("network", 1, "hierarchical"),
    ):
        request = plan.reshard_request(scope, len(source), locals_, ranges(*source), ranges(*destination))
        found = list(moves(plan.build(request, algorithm)))
        assert [sum(count for origin, _, count in found if origin == rank) for rank in range(len(sent))] == sent
