"""Validate accepts every algorithm for every small geometry. test_validate.cc tests Validate itself."""

import itertools
import random

import pytest

from jaxcomm._core import plan

GEOMETRIES = {
    size: [(nodes, size // nodes) for nodes in range(1, size + 1) if size % nodes == 0] for size in range(1, 17)
}
# (block_count, chunk_count). 300 cuts 4096 into more chunks than any algorithm has slots of scratch.
SIZES = [(0, 0), (1, 0), (7, 0), (4096, 0), (0, 3), (7, 3), (4096, 1000), (4096, 300)]
ALGORITHMS = [
    (row.name, name) for row in plan.collectives() if row.elements != "boxes" for name, _ in plan.algorithms(row.name)
]
ONE_ADDRESS_SPACE = {
    ("all_reduce", "direct"),
    ("all_reduce", "root"),
    ("all_reduce", "one_shot"),
    ("reduce_scatter", "direct"),
    ("broadcast", "scatter_all_gather"),
}
POWER_OF_TWO = {("all_gather", "recursive_doubling"), ("reduce_scatter", "recursive_halving")}


def expected_support(collective, algorithm, nodes, locals_, addressable):
    num_ranks = nodes * locals_
    if algorithm == "hierarchical":
        return nodes > 1 and (locals_ > 1 or collective in ("dispatch", "combine"))
    if algorithm == "multimem":
        return nodes == 1
    if (collective, algorithm) in ONE_ADDRESS_SPACE or algorithm.startswith("ll"):
        return addressable or nodes == 1
    if (collective, algorithm) in POWER_OF_TWO:
        return num_ranks & (num_ranks - 1) == 0
    return True


def permutations(num_ranks, rng):
    """Shift, identity, all zeros, one source for all ranks, and random partial permutations."""
    ranks = list(range(num_ranks))
    yield ranks[1:] + ranks[:1]
    yield ranks
    yield [-1] * num_ranks
    yield [0] * num_ranks
    for _ in range(3):
        shuffled = rng.sample(ranks, num_ranks)
        yield [rank if rng.random() < 0.7 else -1 for rank in shuffled]


def variants(collective, num_ranks, rng):
    """Keyword arguments that matter for the collective."""
    if collective == "broadcast":
        return [{"root": root} for root in range(num_ranks)]
    if collective == "permute":
        return [{"source_of": source_of} for source_of in permutations(num_ranks, rng)]
    return [{}]


@pytest.mark.parametrize("sizes", [range(1, 9), pytest.param(range(9, 17), marks=pytest.mark.full)], ids=["8", "16"])
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_plan_is_correct(collective, algorithm, sizes):
    rng = random.Random(0)
    geometries = [geometry for size in sizes for geometry in GEOMETRIES[size]]
    pulls = (False, True) if algorithm in ("direct", "hierarchical") else (False,)  # the others ignore it
    for (nodes, locals_), addressable, pull in itertools.product(geometries, (True, False), pulls):
        for variant in variants(collective, nodes * locals_, rng):
            for block, chunk in SIZES:
                reach = {"all_addressable": addressable, "pull": pull, "multimem": True}
                request = plan.Request(collective, nodes, locals_, block, chunk, **reach, **variant)
                where = f"{nodes} x {locals_}, block {block}, chunk {chunk}, {reach}, {variant}"
                supported = plan.supports(request, algorithm)
                assert supported == expected_support(collective, algorithm, nodes, locals_, addressable), where
                if supported:
                    assert plan.check(request, algorithm) == "", where


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="expected one of all_to_all"):
        plan.Request("all_too_all")
    with pytest.raises(ValueError, match="expected one of direct"):
        plan.build(plan.Request("barrier"), "fast")


def test_plans_changed_in_python_are_checked():
    """A place outside of the scratch; a plan too few. test_validate.cc has all faults."""
    request = plan.Request("all_gather", 1, 3, 4)
    plans = plan.build(request, "ring")
    zero = plan.Step()
    zero.kind, zero.count, zero.dst.space, zero.dst.offset = "zero", 3, "scratch", 2
    plans[0].scratch_count, plans[0].steps = 4, [zero, *plans[0].steps]
    assert str(plans[0]).startswith("rank 0 of 3, scratch 4\n  zero 0.scratch[2] x3\n  put 1.output[0] = 0.input[0] x4")
    sums = plan.build(plan.Request("all_reduce", 1, 2, 4), "one_shot")
    assert str(sums[1]) == "rank 1 of 2, scratch 0\n  reduce 1.output[0] = 0.input[0] + 1.input[0] x4\n"
    fault = "rank 0, step 0 (zero): scratch [2, 5) of rank 0 exceeds the buffer of 4 elements"
    assert plan.validate(plans, request) == fault
    assert plan.validate(plans[:2], request) == "got 2 plans for 3 ranks"


def test_malformed_requests_are_refused():
    """test_plan.cc has the limits."""
    values = {"num_nodes": 2, "ranks_per_node": 3, "block_count": 4, "chunk_count": 5, "root": 1}
    values |= {"source_of": [5] * 6, "all_addressable": False}
    request = plan.Request("permute", **values)
    assert {name: getattr(request, name) for name in values} == values and plan.supports(request, "direct")
    request.source_of = [6] * 6
    assert not plan.supports(request, "direct")
    with pytest.raises(ValueError, match="permute: sizes, root or permutation are not valid"):
        plan.build(request, "direct")
