"""Selection: by name, by lowest cost, and the reasons why an algorithm cannot be used."""

import numpy as np
import pytest

from jaxcomm._core import plan
from jaxcomm.ops import all_to_all

COLLECTIVES = [row.name for row in plan.collectives() if row.elements != "boxes"]


def cluster():
    """One processor per rank, a fast network in the node and a slower one between nodes."""
    links = [("self", 1e-6, 2e12, 0.0), ("node", 1e-6, 4e11, 0.0), ("network", 5e-6, 5e10, 0.0)]
    return plan.Machine(links, 5e-6, 1)


def request(collective, nodes, locals_, block=1024, addressable=True):
    num_ranks = nodes * locals_
    source_of = [(rank + 1) % num_ranks for rank in range(num_ranks)] if collective == "permute" else []
    return plan.Request(collective, nodes, locals_, block, 0, 0, source_of, addressable)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_cheapest_is_chosen(collective):
    for block in (0, 16, 4096, 1 << 20):
        for nodes, locals_ in ((1, 1), (1, 6), (8, 1)):
            if collective in ("dispatch", "combine") and nodes > 1:
                continue  # hierarchical plans are preferred, also for nodes of one rank
            asked = request(collective, nodes, locals_, block, addressable=nodes == 1)
            choice = plan.select(asked, "", 4, cluster())
            costs = {}
            for name, _ in plan.algorithms(collective):
                if plan.supports(asked, name) and plan.protocol(collective, name) == "steps":
                    alternative = plan.select(asked, name, 4, cluster())
                    costs[name] = alternative.cost.time_s
                    assert name in choice.reason
            assert choice.cost.time_s == costs[choice.algorithm]
            assert choice.cost.time_s <= 1.05 * min(costs.values())
            assert choice.reason.startswith(f"lowest predicted cost of {len(costs)}: ")


@pytest.mark.parametrize("collective", sorted(set(COLLECTIVES) - {"permute", "all_to_all_v"}))
def test_declared_nodes_get_the_hierarchical_plan_but_not_for_rows_in_one_address_space(collective):
    rows = collective in ("dispatch", "combine")
    for locals_, addressable in ((4, True), (4, False), *(((1, True), (1, False)) if rows else ())):
        asked = request(collective, 2, locals_, 1 if rows else 1024, addressable=addressable)
        choice = plan.select(asked, "", 4, cluster())
        assert choice.algorithm == ("direct" if rows and addressable else "hierarchical")
        assert choice.reason.startswith(f"made for 2 nodes of {locals_} ranks: ") == (choice.algorithm != "direct")


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_an_exchange_is_staged_if_numpy_says_that_the_blocks_of_both_arrays_are_contiguous(split, concat):
    # On 72 ranks, a chunk of a block has 3.5 KiB: as one move or, at less than 32 KiB, as none.
    n = 72
    x = np.broadcast_to(np.float32(0), (2 * n, 1024 * n))
    parts = np.split(np.empty_like(x, order="C"), n, split)
    y = np.concatenate(parts, concat)
    contiguous = [block.flags.c_contiguous for block in (parts[1], np.split(y, n, concat)[1])]
    attributes = all_to_all._attributes(x, n, split_axis=split, concat_axis=concat)
    able = plan.Capabilities("cuda", setting="plans", max_channels=1)
    attributes |= {"group_size": n, "ranks_per_node": n, "algorithm": "direct"}
    placement = plan.Placement(ranks_per_node=n)
    found = plan.resolve("all_to_all", attributes, "float32", x.size, y.size, placement, able)
    assert (found.request.staged_count > 0) == all(contiguous)
    if not all(contiguous):  # a copy of the operand into the arena, and of the own block
        assert found.call_cost().self.bytes == x.nbytes + x.nbytes // n


def test_plans_for_nodes_that_nvlink_or_the_network_connects():
    """Of all divisions of 6 GPUs into nodes, a message has the first. Combine needs no marks between nodes."""
    call = "all_gather", {"group_size": 6, "ranks_per_node": 6, "algorithm": "recursive_doubling"}, "float32", 8, 48
    with pytest.raises(ValueError, match="needs a power of two of ranks, got 1 nodes of 6 ranks"):
        plan.resolve(*call, plan.Placement(ranks_per_node=2, found=False), plan.Capabilities("cuda", setting="plans"))
    layer = {"group_size": 8, "ranks_per_node": 8, "choices": 8, "num_experts": 3064, "row_count": 4}
    call = "combine", layer | {"algorithm": "hierarchical"}, "float32", 8 << 17, 8, plan.Placement("process", 4, False)
    assert plan.resolve(*call, plan.Capabilities("cuda")).backend == "rows"
