"""The collectives of a training step of each script: none twice, and no other ones."""

import pytest
import scripts
from scripts import tiny

MESH = {"microbatches": 2, "attention": "gather", "matmul": "unfused"}
TABLE = [
    # Of three layers; gradients, loss.
    ("cp", {"attention": "ring", "layers": 3}, {"permute": 3 * (3 + 3 + 4), "all_reduce": 2}),
    ("cp", {"attention": "ulysses", "layers": 3}, {"all_to_all": 3 * 4, "all_reduce": 2}),
    ("cp", {"attention": "gather", "layers": 3}, {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 2}),
    ("mesh", {"layout": "1x1x1x1", "experts": 0, **MESH}, {}),
    # Each loop body is there twice: forward, and recomputed in the backward pass. An axis of size 1 has no collectives.
    ("mesh", {"layout": "2x1x2x2", "experts": 4, **MESH}, {
        "permute": 2,
        # Parameters of embedding, layers and head; keys and values; the products of tensor parallelism in a layer with
        # attention, in the head and behind the embedding; the counts of rows of each expert.
        "all_gather": 3 + 2 + 8 + 2,
        "reduce_scatter": 3 + 1 + 6,
        # Gradients: matrices of embedding and head, other parameters of layers, other parameters of the head. Norm, as
        # these. Largest score, sum and target of the cross entropy. Loss, balancing loss.
        "all_reduce": 3 + 3 + 4 + 1 + 1,
        "moe_check": 2, "moe_count": 2, "moe_place": 2, "moe_slices": 6,
        "dispatch": 3, "combine": 3,  # each is the derivative of the other
    }),
    # With MLPs instead of experts, whose products have collectives too.
    ("mesh", {"layout": "2x1x2x2", "experts": 0, **MESH},
     {"permute": 2, "all_gather": 3 + 2 + 12, "reduce_scatter": 3 + 1 + 9, "all_reduce": 3 + 3 + 4 + 1}),
    # One ppermute in each direction, for any number of layers, microbatches and rounds. Gradients of the layers,
    # gradients of embedding and scores, norm, loss.
    ("pp", {"layers": 8, "microbatches": 4, "rounds": 2}, {"permute": 2, "all_reduce": 4}),
    ("pp", {"layers": 8, "microbatches": 4, "rounds": 1, "schedule": "1f1b"}, {"permute": 2, "all_reduce": 4}),
    ("tp", {"layout": "1x1"}, {}),
    # Per layer: 2 gathers and 2 scatters forward, as many backward, and 2 gathers for the gradients of weights. Head
    # forward and its weights, embedding backward; embedding forward, head backward. Largest score, sum and target;
    # gradients over data and over all ranks; norm; loss.
    ("tp", {"layers": 3, "matmul": "unfused"},
     {"all_gather": 6 * 3 + 3, "reduce_scatter": 4 * 3 + 2, "all_reduce": 2 + 2 + 1 + 1}),
    # Only the embedding has other ones.
    ("tp", {"layers": 2, "matmul": "ring"},
     {"permute": 3 * (10 * 2 + 3), "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2 + 2 + 1 + 1}),
    # Embedding, all layers, scores; loss and norm.
    ("zero", {"stage": 0, "layers": 3}, {"all_reduce": 3 + 2}),
    ("zero", {"stage": 1, "layers": 3}, {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 2}),
    ("zero", {"stage": 2, "layers": 3}, {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 2}),
    # Gathers: embedding, scores, first layer, both loops over layers, before the second loop. Sums: embedding, scores,
    # loop, last two layers. The transfers of layers are started.
    ("zero", {"stage": 3, "layers": 3}, {"all_gather": 6, "reduce_scatter": 5, "all_reduce": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "options", "wanted"), TABLE)
def test_collectives_of_a_step(script, options, wanted):
    config = tiny(script, **options)
    found = scripts.program(config)
    assert scripts.collectives(found.step, scripts.jax.eval_shape(found.init), scripts.tokens(config)) == wanted
