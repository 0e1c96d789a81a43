"""Every step, signal and element of a built-in plan is needed: Validate rejects the plan without it.

None of the mutants is filtered out afterwards. test_interleavings.cc has other mutants, which may be correct.
"""

import itertools

import pytest

from jaxcomm._core import plan

MOVES = ("copy", "put", "get")
DATA = (*MOVES, "reduce", "zero")
# LL and multimem algorithms have the plans of other rows (test_plan.cc).
ALGORITHMS = [
    pytest.param(collective, name, marks=[] if plan.protocol(collective, name) == "steps" else pytest.mark.full)
    for collective in (row.name for row in plan.collectives() if row.elements != "boxes")
    for name, _ in plan.algorithms(collective)
]
# Nodes, ranks per node, elements of a block and of a chunk: sizes that no number of ranks divides, and chunks small
# enough that slots of scratch are used again. An all_reduce splits its block, so there it is larger.
CASES = [(1, 4, 9, 0), (1, 5, 7, 2), (2, 2, 11, 2)]
MORE_CASES = [(1, 2, 5, 0), (3, 2, 11, 2), (2, 3, 7, 0), (8, 1, 5, 3)]
ALL_REDUCE_FACTOR = 4
of_cases = pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.full)], ids=["few", "more"]
)


def requests(collective, algorithm, cases):
    for nodes, locals_, block, chunk in cases:
        num_ranks = nodes * locals_
        source_of = [(rank + 1) % num_ranks for rank in range(num_ranks)]
        source_of[1] = -1
        count = block * ALL_REDUCE_FACTOR + 1 if collective == "all_reduce" else block
        # Only these depend on addressability. Validate is less strict if all ranks are addressable.
        depends = algorithm in ("direct", "hierarchical")
        for addressable, pull in itertools.product((True, False), repeat=2) if depends else [(True, False)]:
            reach = {"all_addressable": addressable, "pull": pull, "multimem": True}
            request = plan.Request(collective, nodes, locals_, count, chunk, num_ranks // 2, source_of, **reach)
            if plan.supports(request, algorithm):
                yield request


def with_steps(plans, rank, steps):
    mutant = plan.Plan(plans[rank])
    mutant.steps = steps
    return [*plans[:rank], mutant, *plans[rank + 1 :]]


def edits(plans, kinds, edit):
    """For every step of the given kinds, the group with that step changed by `edit`; None where it does not apply."""
    for rank, one in enumerate(plans):
        for i, old in enumerate(one.steps):
            if old.kind in kinds:
                steps = one.steps
                if edit(steps, i) is not False:
                    yield f"rank {rank}, step {i} ({old.kind})", with_steps(plans, rank, steps)


def drop_step(plans, request):
    """Drops a step: every step of a plan is needed."""
    yield from edits(plans, (*DATA, "signal", "wait"), lambda steps, i: steps.pop(i))


def signal_before_put(plans, request):
    """Moves a signal ahead of the last put that it covers."""

    def edit(steps, i):
        before = [j for j in range(i) if steps[j].peer == steps[i].peer and steps[j].kind in ("put", "signal")]
        if not before or steps[before[-1]].kind == "signal":
            return False  # covers nothing that was put since the signal before
        steps.insert(before[-1], steps.pop(i))
        return None

    yield from edits(plans, ("signal",), edit)


def drop_pair(plans, request):
    """Drops a signal together with its wait: every single edge of the order is needed."""
    places = {}
    for rank, one in enumerate(plans):
        for i, step in enumerate(one.steps):
            if step.kind == "signal":
                places.setdefault((rank, step.peer), ([], []))[0].append(i)
            elif step.kind == "wait":
                places.setdefault((step.peer, rank), ([], []))[1].append(i)
    for (sender, receiver), (signals, waits) in places.items():
        for signal, wait in zip(signals, waits, strict=True):
            steps = plans[sender].steps
            del steps[signal]
            mutant = with_steps(plans, sender, steps)
            steps = plans[receiver].steps
            del steps[wait]
            yield f"{sender} -> {receiver}", with_steps(mutant, receiver, steps)


def shorten(plans, request):
    def edit(steps, i):
        steps[i].count -= 1

    yield from edits(plans, DATA, edit)


def shift_src(plans, request):
    def edit(steps, i):
        steps[i].src.offset += 1 if steps[i].src.offset == 0 else -1

    yield from edits(plans, MOVES, edit)


# Operators that change only the order of two ranks.
ORDER_OPERATORS = [signal_before_put, drop_pair]
OPERATORS = [drop_step, shorten, shift_src]


def moves_of_lists(plans, request):
    """Moves of a hierarchical combine whose contents Validate does not prove, because the result does not have them.

    They carry the lists of the rows that other nodes add, in the first two areas of scratch.
    tests/cpu/test_row_lists.cc proves them.
    """
    end = 2 * (request.num_nodes - 1) * request.block_count
    return {
        f"rank {rank}, step {i} ({step.kind})"
        for rank, one in enumerate(plans)
        for i, step in enumerate(one.steps)
        if step.kind in MOVES and step.dst.space == "scratch" and step.dst.offset < end
    }


def survivors(collective, algorithm, cases, operators):
    """The mutants that pass, and how many there were."""
    passed, tried = [], 0
    for request in requests(collective, algorithm, cases):
        plans = plan.build(request, algorithm)
        assert plan.validate(plans, request) == ""
        not_proved = moves_of_lists(plans, request) if (collective, algorithm) == ("combine", "hierarchical") else ()
        for operator in operators:
            for where, mutant in operator(plans, request):
                if where in not_proved:
                    continue
                tried += 1
                if plan.validate(mutant, request) == "":
                    geometry = f"{request.num_nodes} x {request.ranks_per_node}, addressable {request.all_addressable}"
                    passed.append(f"{operator.__name__}, {geometry}: {where}")
    return passed, tried


@of_cases
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_mutant_is_rejected(collective, algorithm, cases):
    passed, tried = survivors(collective, algorithm, cases, OPERATORS)
    assert passed == []
    assert tried > 0


# Signals of a pairwise exchange do not order data, and a barrier has no data.
ORDERED = [row for row in ALGORITHMS if row.values[0] != "barrier" and row.values[1] != "pairwise"]


@of_cases
@pytest.mark.parametrize(("collective", "algorithm"), ORDERED)
def test_every_mutant_of_the_order_is_rejected(collective, algorithm, cases):
    passed, tried = survivors(collective, algorithm, cases, ORDER_OPERATORS)
    assert passed == []
    plans = [one for request in requests(collective, algorithm, cases) for one in plan.build(request, algorithm)]
    assert (tried > 0) == any(step.kind == "signal" for one in plans for step in one.steps)


@pytest.mark.parametrize("algorithm", [name for name, _ in plan.algorithms("barrier")])
def test_every_signal_of_a_barrier_is_needed(algorithm):
    passed, tried = survivors("barrier", algorithm, CASES + MORE_CASES, [drop_pair])
    assert passed == []
    assert tried > 0
