"""The choice of an algorithm, and the names that the keyword accepts."""

import jax
import numpy as np
import pytest
from products import collectives, gathers, line_of, scatters

import jaxcomm
from jaxcomm._core import plan
from jaxcomm._processes import placement


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_psum_scatter"])
def test_names(op):
    assert sorted(jaxcomm.algorithms(op)) == ["direct", "ring", "unfused"]
    assert "Raises:" in getattr(jaxcomm, op).__doc__


@pytest.mark.parametrize("platform", ["cpu", "cuda", "other"])
@pytest.mark.parametrize("scope", ["process", "node", "network"])
@pytest.mark.parametrize("needs_all_rows", [False, True])
def test_the_ring_is_chosen_where_it_was_measured(platform, scope, needs_all_rows):
    measured = platform == "cpu" and scope == "node" and not needs_all_rows
    found = plan.resolve_collective_matmul(needs_all_rows, plan.Placement(scope), plan.Capabilities(platform))
    assert found == ("ring" if measured else "unfused")


@pytest.fixture
def two_processes(monkeypatch):
    """Placements of programs whose ranks belong to two processes, in turns. They are lowered, not run."""

    def of_groups(mesh, rows):
        own = placement.GroupPlacement((rows % 2).reshape(-1), ranks_per_node)
        return own if rows.shape[1] > 1 else alone

    ranks_per_node, alone = None, placement.GroupPlacement(np.empty(0, np.int32), None)
    monkeypatch.setattr(placement, "of_groups", of_groups)


RING = {"permute": 3}


@pytest.mark.usefixtures("two_processes")
def test_what_a_program_of_two_processes_runs():
    """The transposes of both are products of rows and of sums: each is chosen on its own."""
    x, w, ct = np.zeros((4, 8, 16), np.float32), np.zeros((4, 16, 8), np.float32), np.zeros((4, 32, 8), np.float32)
    mesh = line_of(4)
    assert collectives(gathers(), mesh, x, w) == RING
    assert collectives(gathers(save_gathered=True), mesh, x, w) == RING
    assert collectives(scatters(), mesh, ct.swapaxes(1, 2).reshape(4, 16, 16), w) == RING
    assert collectives(gathers(algorithm="unfused"), mesh, x, w) == {"all_gather": 1}

    def of_operand(i):
        def f(x, w, ct):
            operands = [x, w]
            moving = lambda y: gathers()(*operands[:i], y, *operands[i + 1 :])  # noqa: E731
            return jax.vjp(moving, operands[i])[1](ct)[0]

        return f

    assert collectives(of_operand(0), mesh, x, w, ct) == RING
    assert collectives(of_operand(1), mesh, x, w, ct) == {"all_gather": 1}


def test_a_program_of_one_process_is_not_split():
    x, w = np.zeros((4, 8, 16), np.float32), np.zeros((4, 16, 8), np.float32)
    assert collectives(gathers(), line_of(4), x, w) == {"all_gather": 1}
