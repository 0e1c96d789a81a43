"""The training step; see models/lm/step.py. Every device is a data-parallel rank and holds a share of the experts.

``comm`` is ``jaxcomm`` or ``jax.lax``. Tokens go through ``jaxcomm.moe`` or ``all_to_all`` (in dropless.py and
model.py), sums of gradients through ``psum``.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm import step
from .config import AXES
from .model import Transformer

LOSSES = ("loss", "balance", "dropped")


def losses(config, model, tokens, comm, *, capacity_factor):
    """This rank's shares of the losses, and of the dropped choices.

    The gradient is that of the local loss, and all_to_all exchanges the cotangents between ranks. Hence the gradient of
    a replicated parameter is partial and must be summed over ranks. The gradient of an expert is complete, because it
    includes the tokens of all ranks.
    """
    logits, stats = model(tokens[:, :-1], capacity_factor=capacity_factor, comm=comm)
    values = lm.cross_entropy(logits, tokens[:, 1:]).mean(), stats.balance, stats.dropped
    return {name: value / config.ranks() for name, value in zip(LOSSES, values, strict=True)}


def build(config, mesh, comm):
    """The program for the training loop of models/lm. Its evaluation returns all metrics, with its own capacity."""
    _, shapes, _ = lm.structure(config, Transformer)
    specs = jax.tree_util.tree_map_with_path(lambda path, _: P(AXES) if path[-1].key in ("up", "down") else P(), shapes)
    return step.build(
        config,
        mesh,
        comm,
        functools.partial(losses, capacity_factor=config.capacity),
        specs,
        dict.fromkeys(LOSSES, AXES),
        module=Transformer,
        weights={"loss": 1.0, "balance": config.balance, "dropped": 0.0},
        evaluation=functools.partial(losses, capacity_factor=config.eval_capacity),
    )
