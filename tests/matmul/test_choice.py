"""The choice of an algorithm."""

import jax
import numpy as np
import pytest
from products import collectives, gathers, line_of, scatters

from jaxcomm._core import plan
from jaxcomm._processes import placement


@pytest.mark.parametrize("platform", ["cpu", "cuda", "other"])
@pytest.mark.parametrize("scope", ["process", "node", "network"])
@pytest.mark.parametrize("product", ["rows", "sums", "scatter"])
@pytest.mark.parametrize("size", [0, (128 << 10) - 1, 128 << 10, 1 << 30])
def test_the_ring_is_chosen_where_it_was_measured(platform, scope, product, size):
    measured = (platform, scope, product) == ("cpu", "node", "rows") and size >= 128 << 10
    found = plan.resolve_collective_matmul(product, size, plan.Placement(scope), plan.Capabilities(platform))
    assert found == ("ring" if measured else "unfused")


@pytest.fixture
def two_processes(monkeypatch):
    """Placements of programs whose ranks belong to two processes, in turns. They are lowered, not run."""

    def of_groups(mesh, rows):
        return placement.GroupPlacement((rows % 2).reshape(-1), None)

    monkeypatch.setattr(placement, "of_groups", of_groups)


@pytest.mark.usefixtures("two_processes")
def test_what_a_program_of_two_processes_runs():
    """Each product of a program and of its derivatives is chosen on its own."""
    mesh, ring = line_of(4), {"permute": 3}
    x, w, ct = (np.zeros((4, *shape), np.float32) for shape in ((1024, 32), (32, 32), (4096, 32)))
    assert collectives(gathers(), mesh, x, w) == ring
    assert collectives(gathers(), mesh, x[:, :1023], w) == {"all_gather": 1}
    assert collectives(gathers(algorithm="unfused"), mesh, x, w) == {"all_gather": 1}
    assert collectives(scatters(), mesh, ct, w) == {"reduce_scatter": 1}

    def of_operand(f, i):
        """The derivative for one of the operands, without the product itself."""

        def transpose(ct, *operands):
            moving = lambda y: f(*operands[:i], y, *operands[i + 1 :])  # noqa: E731
            return jax.vjp(moving, operands[i])[1](ct)[0]

        return transpose

    assert collectives(of_operand(gathers(), 0), mesh, ct, x, w) == {"reduce_scatter": 1}
    assert collectives(of_operand(gathers(), 1), mesh, ct, x, w) == {"all_gather": 1}
    assert collectives(of_operand(scatters(), 0), mesh, x, ct, w) == ring
    assert collectives(of_operand(scatters(), 1), mesh, x, ct, w) == {"all_gather": 1}


def test_a_program_of_one_process_is_not_split():
    x, w = np.zeros((4, 1024, 32), np.float32), np.zeros((4, 32, 32), np.float32)
    assert collectives(gathers(), line_of(4), x, w) == {"all_gather": 1}
