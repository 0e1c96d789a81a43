"""The choice of an algorithm, and the names that the keyword accepts."""

import jax
import numpy as np
import pytest
from harness import on_ranks
from products import collectives, gathers, line_of

import jaxcomm
from jaxcomm.matmul import choice
from jaxcomm.matmul.choice import Size, choose, size_of_gather, size_of_scatter


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_psum_scatter"])
def test_names(op):
    assert sorted(jaxcomm.algorithms(op)) == ["direct", "ring", "unfused"]
    assert "Raises:" in getattr(jaxcomm, op).__doc__


@pytest.mark.parametrize(
    ("size", "one_node", "overlaps", "expected"),
    [
        (Size(104, 22_000), True, True, "direct"),
        (Size(104, 22_000), False, True, "ring"),
        (Size(103, 22_000), True, True, "unfused"),
        (Size(104, 22_001), True, True, "unfused"),
        (Size(104, 22_000), True, False, "unfused"),
    ],
)
def test_choice(size, one_node, overlaps, expected):
    assert choose(size, one_node=one_node, overlaps=overlaps) == expected


def test_published_sizes():
    """8 H100, width 6656: chunks lose at 256 rows per rank and win at 512 (meta-pytorch/kraken#2)."""
    choices = {}
    for rows in (256, 512):
        size = size_of_gather((rows, 16384), [(16384, 6656)], 1, 1)
        choices[rows] = choose(size, one_node=True, overlaps=True)
    assert choices == {256: "unfused", 512: "direct"}


def test_sizes():
    """Tiles of 128 x 256 in the products with one chunk; multiplications per element sent."""
    weights = [(64, 512), (64, 257)]
    assert size_of_gather((2, 128, 64), weights, 2, 1) == Size(2 * 2 + 2 * 2, 512 + 257)
    assert size_of_gather((2, 128, 64), weights, 2, 2) == Size(1 * 2 + 1 * 2, 512 + 257)
    # The gradient of the second weight contracts the rows: its product has 64 x 300 elements.
    assert size_of_gather((2, 128, 64), [(64, 512), (2, 1024, 300)], 1, 1) == Size(2 * 2 + 1 * 2, 512 + 300)
    assert size_of_scatter([((1024, 64), (64, 512))], 4) == Size(2 * 2, 64)
    assert size_of_scatter([((1024, 64), (64, 512)), ((1024, 32), (32, 512))], 8) == Size(2 + 2, 64 + 32)


def test_the_choice_is_made_when_lowering(monkeypatch):
    x, w = np.zeros((4, 512, 8), np.float32), np.zeros((4, 8, 8192), np.float32)
    mesh = line_of(4)
    assert collectives(gathers(), mesh, x, w) == {"all_gather": 1}
    monkeypatch.setattr(choice, "OVERLAPPING", {"cpu"})
    assert collectives(lambda x, w: gathers()(x, w), mesh, x, w) == {"permute": 3}
    assert collectives(lambda x, w: gathers()(x, w[:, :256]), mesh, x, w) == {"all_gather": 1}


def test_a_hierarchy_takes_the_ring(mesh, monkeypatch):
    """The axes declare 2 nodes: between nodes, a block goes to one neighbour at a time."""
    monkeypatch.setattr(choice, "OVERLAPPING", {"cpu"})
    x, w = np.zeros((8, 512, 8), np.float32), np.zeros((8, 8, 8192), np.float32)
    text = jax.jit(on_ranks(lambda x, w: jaxcomm.all_gather_matmul(x, w, mesh.axis_names), mesh)).lower(x, w).as_text()
    assert text.count("@jaxcomm_permute(") == 7
