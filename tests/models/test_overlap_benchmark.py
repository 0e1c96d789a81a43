"""benchmarks/overlap.py: the collectives of a step are all counted, and the stub has the shapes of the collectives."""

import collections

import pytest
import scripts
from scripts import tiny

from benchmarks import overlap
from models.lm import train as train_lib

LAYERS, TICKS = 4, 2 * 2 + 2 - 1
COUNTS = {
    # Embedding and scores, then layers: each one in both passes, the last one only once. Loss and norm.
    "zero": ({"layers": LAYERS}, {"all_gather": 2 + 2 * LAYERS - 1, "reduce_scatter": 2 + LAYERS, "all_reduce": 2}),
    # Both passes. Gradients of stages and of all ranks; loss; norms of both.
    "pp": (
        {"layers": LAYERS, "layout": "2x2", "rounds": 2, "microbatches": 2},
        {"permute": 2 * TICKS, "all_reduce": 4},
    ),
}


@pytest.mark.parametrize("script", COUNTS)
def test_all_collectives_of_a_step_are_counted(script):
    options, wanted = COUNTS[script]
    config = tiny(script, **options)
    found = collections.Counter()
    for eqn, times in overlap.of_step(scripts.SCRIPTS[script], config, train_lib.make_mesh(config)):
        found[eqn.primitive.name.removeprefix("jaxcomm_")] += times
    assert found == wanted
