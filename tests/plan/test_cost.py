"""The traffic of every plan matches the formulas in docs/reference/algorithms.md, and so do predicted times."""

import re
from pathlib import Path

import pytest

from jaxcomm._core import plan

ALGORITHMS = [
    (row.name, name) for row in plan.collectives() if row.elements != "boxes" for name, _ in plan.algorithms(row.name)
]
ITEM_BYTES = 4
BLOCK = 840  # divisible by all numbers of ranks here
B = BLOCK * ITEM_BYTES


MACHINE = plan.Machine([("self", 1e-7, 1e10, 0.0), ("node", 1e-6, 1e11, 0.0), ("network", 5e-6, 2e10, 0.0)], 0.0, 1)


def ceil_log2(n):
    return (n - 1).bit_length()


def children(v, n):
    """The children of v in a binomial tree over 0 .. n - 1."""
    bits = [1 << k for k in range(n.bit_length()) if (1 << k) < (v & -v if v else n)]
    return [v + bit for bit in bits if v + bit < n]


def inner_children(v, n):
    """The children that have children themselves, and so need a signal."""
    return [child for child in children(v, n) if children(child, n)]


# One level: all links are of one class. (messages, bytes, signals) to other ranks, bytes in own memory, bytes of
# scratch, of rank r of n; the root of a broadcast is rank 0.


def bruck_all_to_all(n, r):
    moved = [sum(1 for i in range(n) if i >> k & 1) for k in range(ceil_log2(n))]
    packed = sum(m for m in moved if m > 1)
    return (len(moved), sum(moved) * B, len(moved)), (packed + n) * B, (n // 2 + sum(moved)) * B


def bruck_all_gather(n, r):
    bits = [1 << k for k in range(ceil_log2(n))]
    wraps = sum(1 for bit in bits if r + min(bit, n - bit) > n)
    return (len(bits) + wraps, (n - 1) * B, sum(1 for bit in bits if n > 3 * bit)), B, 0


def folded(n, r, messages, volume, signals, local, scratch):
    """The cost of an algorithm for a power of two of ranks if some ranks send their block to the next rank."""
    extra = n - (1 << (n.bit_length() - 1))
    scratch += B if extra else 0
    if r < 2 * extra and r % 2 == 0:
        return (1, B, 1), 0, scratch
    if r < 2 * extra:
        return (messages + 1, volume + B, signals), local + 2 * B, scratch
    return (messages, volume, signals), local, scratch


def rabenseifner(n, r):
    rounds = n.bit_length() - 1
    size = 1 << rounds
    extra = n - size
    member = r // 2 if r < 2 * extra else r - extra
    # The last round needs a signal only to a peer that stands for another rank.
    last = 1 if rounds and (member ^ size // 2) < extra else 0
    volume = 2 * (size - 1) * B // size
    return folded(n, r, 2 * rounds, volume, max(2 * rounds - 1 + last, 0), volume if n > 1 else B, volume // 2)


def tree_all_reduce(n, r):
    up, down = int(r > 0), len(children(r, n))
    local = (1 + down) * B if down or r == 0 else 0
    return (up + down, (up + down) * B, up + len(inner_children(r, n))), local, ceil_log2(n) * B


ONE_LEVEL = {
    ("all_to_all", "direct"): lambda n, r: ((n - 1, (n - 1) * B, 0), B, 0),
    ("all_to_all", "pairwise"): lambda n, r: ((n - 1, (n - 1) * B, max(n - 2, 0)), B, 0),
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("all_gather", "direct"): lambda n, r: ((n - 1, (n - 1) * B, 0), B, 0),
    ("all_gather", "recursive_doubling"): lambda n, r: ((ceil_log2(n), (n - 1) * B, max(ceil_log2(n) - 1, 0)), B, 0),
    ("all_gather", "bruck"): bruck_all_gather,
    ("all_gather", "ring"): lambda n, r: ((n - 1, (n - 1) * B, max(n - 2, 0)), B, 0),
    ("reduce_scatter", "direct"): lambda n, r: ((n - 1, (n - 1) * B, 0), B, 0),
    ("reduce_scatter", "recursive_halving"): lambda n, r: (
        ((ceil_log2(n), (n - 1) * B, ceil_log2(n)), 2 * (n - 1) * B or B, (n - 1) * B)
    ),
    ("reduce_scatter", "ring"): lambda n, r: ((n - 1, (n - 1) * B, n - 1), 2 * (n - 1) * B or B, (n - 1) * B),
    ("all_reduce", "direct"): lambda n, r: ((2 * (n - 1), 2 * (n - 1) * B // n, 0), B // n, 0),
    ("all_reduce", "root"): lambda n, r: ((2 * (n - 1), 2 * (n - 1) * B, 0), B, 0) if r == 0 else ((0, 0, 0), 0, 0),
    ("all_reduce", "one_shot"): lambda n, r: ((n - 1, (n - 1) * B, 0), B, 0),
    ("all_reduce", "rabenseifner"): rabenseifner,
    ("all_reduce", "recursive_doubling"): lambda n, r: (lambda k: folded(n, r, k, k * B, k, 2 * k * B or B, k * B))(
        n.bit_length() - 1
    ),
    ("all_reduce", "ring"): lambda n, r: (
        ((2 * n - 2, (2 * n - 2) * B // n, max(2 * n - 3, 0)), (2 * n - 2) * B // n or B, 0)
    ),
    ("all_reduce", "tree"): tree_all_reduce,
    ("permute", "direct"): lambda n, r: ((1, B, 0), 0, 0) if n > 1 else ((0, 0, 0), B, 0),
    ("broadcast", "direct"): lambda n, r: ((n - 1, (n - 1) * B, 0), B, 0) if r == 0 else ((0, 0, 0), 0, 0),
    ("broadcast", "scatter_all_gather"): lambda n, r: (
        ((n - 1, (n - 1) * B // n, 0), B // n, 0) if r == 0 else ((n, B, 0), 0, 0)
    ),
    ("broadcast", "tree"): lambda n, r: (
        ((len(children(r, n)), len(children(r, n)) * B, len(inner_children(r, n))), B * (r == 0), 0)
    ),
    ("broadcast", "ring"): lambda n, r: ((int(r + 1 < n), B * (r + 1 < n), int(r + 2 < n)), B * (r == 0), 0),
    ("barrier", "direct"): lambda n, r: ((0, 0, n - 1), 0, 0),
    ("barrier", "dissemination"): lambda n, r: ((0, 0, ceil_log2(n)), 0, 0),
}
# Executed step by step, LL and multimem algorithms have the plans of other rows, as those over lists.
SAME = {"all_to_all_v": "all_to_all", "dispatch": "all_to_all", "combine": "reduce_scatter"}
for row in ALGORITHMS:
    if row[0] in SAME and row[1] != "hierarchical":
        ONE_LEVEL[row] = ONE_LEVEL[SAME[row[0]], row[1]]
    elif plan.protocol(*row) != "steps":
        ONE_LEVEL[row] = ONE_LEVEL[row[0], "one_shot" if row == ("all_reduce", "ll") else "direct"]


# Two levels: (messages, bytes, signals) in the node and between nodes, bytes in own memory, bytes of scratch, of a rank
# of G nodes with L ranks.


def hierarchical_broadcast(G, L, g, p, node, local):
    down = len(children(node, G))
    rail = (down, down * B // L, down)
    if (node, local) == (0, 0):
        return (2 * p, 2 * p * B // L, p), rail, B, 0
    peers = p if node else p - 1
    return (peers, peers * B // L, 0), rail, 0, 0


TWO_LEVELS = {  # g, p: other nodes, other ranks of the node
    "all_to_all": lambda G, L, g, p, *_: ((G * p, G * p * B, g * p), (g, g * L * B, 0), G * B, min(4, g) * L * B),
    "dispatch": lambda G, L, g, p, *_: ((G * p, G * p * B, 0), (g, g * L * B, g), G * B, g * L * B),
    "combine": lambda G, L, g, p, *_: ((G * p, G * p * B, 0), (2 * g, 2 * g * B, 2 * g), (3 * G - 2) * B, 4 * g * B),
    "all_gather": lambda G, L, g, p, *_: ((G * p, G * p * B, 0), (g, g * B, g), B, 0),
    "reduce_scatter": lambda G, L, g, p, *_: ((G * p, G * p * B, 0), (g, g * B, g), 2 * G * B, (G + min(2, g)) * B),
    "all_reduce": lambda G, L, g, p, *_: (
        ((2 * G * p, 2 * p * B // L, 0), (2 * g, 2 * g * B // G // L, 2 * g), 2 * B // L, (G + min(2, g)) * B // G // L)
    ),
    "broadcast": hierarchical_broadcast,
    "barrier": lambda G, L, g, p, node, local: ((0, 0, 1 if local else p), (0, 0, 0 if local else ceil_log2(G)), 0, 0),
}


def shift(collective, num_ranks):
    return [(rank + 1) % num_ranks for rank in range(num_ranks)] if collective == "permute" else []


def numbers(traffic):
    return traffic.messages, traffic.bytes, traffic.signals


def counted(request, algorithm, rank):
    """As the formulas."""
    cost = plan.cost(request, algorithm, ITEM_BYTES, MACHINE, rank)
    assert cost.self.signals == 0
    return numbers(cost.node), numbers(cost.network), cost.self.bytes, cost.scratch_bytes


@pytest.mark.parametrize(("collective", "algorithm"), [row for row in ALGORITHMS if row[1] != "hierarchical"])
def test_one_level(collective, algorithm):
    for n in range(1, 9):
        for nodes, locals_ in ((1, n), (n, 1)):
            request = plan.Request(collective, nodes, locals_, BLOCK, source_of=shift(collective, n), multimem=True)
            if not plan.supports(request, algorithm):
                continue
            for rank in range(n):
                traffic, local_bytes, scratch_bytes = ONE_LEVEL[collective, algorithm](n, rank)
                links = ((0, 0, 0), traffic) if nodes > 1 else (traffic, (0, 0, 0))
                assert counted(request, algorithm, rank) == (*links, local_bytes, scratch_bytes), (n, rank)


@pytest.mark.parametrize("collective", [name for name, algorithm in ALGORITHMS if algorithm == "hierarchical"])
@pytest.mark.parametrize(("nodes", "locals_"), [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (6, 2), (7, 3)])
def test_two_levels(collective, nodes, locals_):
    request = plan.Request(collective, nodes, locals_, BLOCK, all_addressable=False)
    for rank in range(nodes * locals_):
        expected = TWO_LEVELS[collective](nodes, locals_, nodes - 1, locals_ - 1, *divmod(rank, locals_))
        assert counted(request, "hierarchical", rank) == expected, rank


def test_rank_must_exist():
    with pytest.raises(ValueError, match="rank"):
        plan.cost(plan.Request("barrier", 1, 4), "direct", 4, MACHINE, 4)


def test_the_document_lists_every_algorithm():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text()
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for collective in (row.name for row in plan.collectives()):
        rows = re.findall(r"^\| `(\w+)` \|", sections[collective], re.MULTILINE)
        assert rows == [name for name, _ in plan.algorithms(collective)], collective


def test_a_link_that_receives_from_many_needs_their_time():
    """Three hosts send 1000 elements each to a fourth one. Its link takes 3000; theirs would take 1000 at once."""
    links = [("self", 0.0, 1e12, 0.0), ("node", 0.0, 1e12, 0.0), ("network", 0.0, 2e6, 0.0)]
    # Two of three hosts send 1000 elements to a rank each of the first one, whose ranks share its link.
    to_host = [0, 0, 0, 0, 0, 1000, 0, 0, 1000, 2000, 0, 0], [0, 1000, 1000, 2000, *[0] * 8]
    request = plan.reshard_request("network", 6, 2, *to_host)
    for shared_network, time_s in ((True, 2e-3), (False, 1e-3)):
        cost = plan.select(request, "direct", 2, plan.Machine(links, 0.0, 1, shared_network)).cost
        assert cost.time_s == pytest.approx(time_s, rel=1e-3)
    to_one = [0, 0, 0, 1000, 1000, 2000, 2000, 3000], [0, 3000, 0, 0, 0, 0, 0, 0]
    for boxes in (to_one, to_one[::-1]):
        request = plan.reshard_request("network", 4, 1, *boxes)
        assert plan.select(request, "direct", 2, plan.Machine(links, 0.0, 1)).cost.time_s == pytest.approx(
            3e-3, rel=1e-3
        )


def test_no_chunk_between_nodes_exceeds_the_largest_message():
    """The model alone would choose larger ones."""
    links = [("self", 1e-6, 2e12, 0.0), ("node", 1e-6, 4e11, 0.0), ("network", 5e-6, 5e10, 0.0)]
    machine, whole = plan.Machine(links, 5e-6, 1), 64 << 20
    largest = []
    for limit in (0, 512 << 10):
        machine.most_message_bytes = limit
        request = plan.reshard_request("network", 2, 1, [0, whole, 0, 0], [0, 0, 0, whole])
        choice = plan.select(request, "", 1, machine)
        plans = plan.build(choice.request, choice.algorithm)
        puts = [step.count for of_rank in plans for step in of_rank.steps if step.kind == "put"]
        assert sum(puts) == whole
        largest.append(max(puts))
    assert largest[0] > largest[1] == 512 << 10
    inside = plan.select(plan.Request("all_reduce", 1, 2, whole, 0, 0, [], True), "ring", 1, machine)
    assert inside.request.chunk_count > 1 << 20
