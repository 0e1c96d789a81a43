"""Pipeline parallelism: each rank of the axis "pipe" is a stage, which holds some of the layers.

The sequences of a group are cut into M microbatches, which pass the p stages one after the other. In tick t, stage i
works on item k = t - i, which is microbatch k % M in round k // M. With several rounds, a microbatch passes all stages
again with other layers ("circular"): a stage then waits p - 1 of v * M + p - 1 ticks.

The derivative of the loop runs the ticks in reverse order and sends the gradients back.

Sizes in the docstrings: b sequences of a microbatch, s bytes each, d width, v rounds.

Sources: GPipe, Huang et al., arXiv 1811.06965; several rounds (interleaving), Narayanan et al., arXiv 2104.04473.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm import step
from ..lm.config import Config as BaseConfig
from ..lm.config import option
from . import one_forward_one_backward

AXIS = "pipe"


@dataclasses.dataclass(frozen=True)
class PipelineConfig(BaseConfig):
    """The options of pipeline()."""

    axes = (AXIS, "data")

    width: int = option(64, "size of a token vector")
    microbatches: int = option(8, "parts of the batch of a group, which are in the pipeline at the same time")
    rounds: int = option(2, "times that a microbatch passes all stages, each time with other layers")

    def __post_init__(self):
        super().__post_init__()
        stages = self.ranks(AXIS)
        self.check(self.rounds >= 1, "rounds", "at least 1")
        self.check(
            self.layers % (stages * self.rounds) == 0,
            "layers",
            f"a multiple of {stages} stages in --layout {self.layout} x {self.rounds} rounds",
        )
        self.check(
            self.microbatches >= stages,
            "microbatches",
            f"at least {stages}, one for each stage in --layout {self.layout}",
        )
        parts = self.ranks("data") * self.microbatches
        self.check(self.batch % parts == 0, "batch", f"a multiple of {parts}, the microbatches of all groups")


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
    name = "pp"
    batch_axes = ("data",)
    free_on_resume = (*BaseConfig.free_on_resume, "microbatches", "schedule")

    layout: str = option("4x2", "sizes of the mesh axes pipe x data")
    layers: int = option(8, "transformer blocks")
    schedule: str = option(
        "circular",
        '"circular": all forward passes, then all backward passes; "1f1b": in turns, which keeps fewer inputs',
        choices=("circular", "1f1b"),
    )

    def __post_init__(self):
        super().__post_init__()
        self.check(self.rounds == 1 or self.schedule == "circular", "rounds", "1 with --schedule 1f1b")


def arrange(config, params):
    """Stacks the layers: (v, p, layers / (v * p), ...). Layer l is in round l // (p * layers per stage)."""
    stages = config.ranks(AXIS)

    def stack(*leaves):
        return jnp.stack(leaves).reshape(config.rounds, stages, -1, *leaves[0].shape)

    blocks = jax.tree.map(stack, *(params["blocks"][i] for i in range(config.layers)))
    return {"embed": params["embed"], "blocks": blocks, "head": params["head"]}


class Stages(NamedTuple):
    """The work on a microbatch. ``params`` are those of the rank, b sequences of tokens are (b, s + 1).

    The functions cast the parameters to the type --dtype. The loop adds the gradients of all microbatches in the type
    of ``params``, which is at least float32.
    """

    enter: Callable  # (params, tokens) -> x, on the first stage
    layer: Callable  # (x, params of a layer) -> (x, {name: metric}), on every stage
    leave: Callable  # (params, x, tokens) -> loss, on the last stage


def pipeline(config, params, tokens, comm, stages, *, loss_axes, metrics=()):
    """Sums of the losses, and of the metrics of the layers, over all microbatches: {"loss", *metrics}, of this rank.

    Args:
      params: {"embed", "blocks", "head"} of this rank, as arrange() stacks them.
      tokens: sequences of this rank.
      loss_axes: mesh axes over which the loss varies. The metrics of layers vary over all axes.
      metrics: names of the metrics.
    """
    num_stages, rounds, count = config.ranks(AXIS), config.rounds, config.microbatches
    stage = jax.lax.axis_index(AXIS)
    tokens = tokens.reshape(count, -1, tokens.shape[1])  # (M, b, s + 1)
    params = {**params, "blocks": jax.tree.map(lambda x: x[:, 0], params["blocks"])}  # (v, layers of a stage, ...)
    precise = jnp.promote_types(config.dtype, jnp.float32)

    def zeros(shape, dtype, axes):
        return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying")

    none = {name: zeros((), precise, config.axes) for name in metrics}

    def work(x, params, number):
        own = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False), params["blocks"])
        x, found = jax.lax.scan(stages.layer, x, own)
        return x, jax.tree.map(lambda x: x.sum().astype(precise), found)

    # Keeps the input of a tick; the backward pass recomputes the layers. Inside the conds, it would keep the weights of
    # each tick too: the conds would return them.
    @jax.checkpoint
    def compute(x, params, tokens, number, first, valid, last):
        x = jax.lax.cond(first, lambda x, *args: stages.enter(*args), lambda x, *_: x, x, params, tokens)
        x, found = jax.lax.cond(valid, work, lambda x, *_: (x, none), x, params, number)
        loss = jax.lax.cond(last, stages.leave, lambda *_: zeros((), precise, loss_axes), params, x, tokens)
        return x, {"loss": loss, **found}

    def tick(carry, time):
        received, waiting, totals = carry
        # The first stage keeps what the last one has sent until its next round.
        place = (time - num_stages) % count
        kept = jax.lax.dynamic_update_index_in_dim(waiting, received, place, 0)
        waiting = jnp.where(time >= num_stages, kept, waiting)
        item = time - stage
        valid = (item >= 0) & (item < rounds * count)
        item = jnp.clip(item, 0, rounds * count - 1)
        number, micro = item // count, item % count
        own = jax.lax.dynamic_index_in_dim(tokens, micro, keepdims=False)
        x = jnp.where(stage == 0, waiting[micro], received)
        first = valid & (stage == 0) & (number == 0)
        last = valid & (stage == num_stages - 1) & (number == rounds - 1)
        x, found = compute(x, params, own, number, first, valid, last)
        totals = {name: totals[name] + found[name] for name in totals}
        if num_stages > 1:
            x = comm.ppermute(x, AXIS, [(source, (source + 1) % num_stages) for source in range(num_stages)])
        return (x, waiting, totals), None

    shape = jax.eval_shape(stages.enter, params, tokens[0]).shape
    carry = (
        zeros(shape, config.dtype, config.axes),
        zeros((count, *shape), config.dtype, config.axes),
        {"loss": zeros((), precise, loss_axes), **none},
    )
    (_, _, totals), _ = jax.lax.scan(tick, carry, jnp.arange(rounds * count + num_stages - 1))
    return totals


def loss(config, params, tokens, comm):
    """This rank's share of the loss: not zero on the last stage only."""
    block, _, _ = lm.structure(config, lm.Block)
    head, _, _ = lm.structure(config, lm.Head)

    def head_loss(params, x, tokens):
        return lm.cross_entropy(nnx.merge(head, lm.cast(params, config))(x), tokens[:, 1:]).mean()

    stages = Stages(
        enter=lambda params, tokens: lm.embed(params["embed"], tokens[:, :-1], config.dtype),
        layer=lambda x, params: (nnx.merge(block, lm.cast(params, config))(x), {}),
        leave=lambda params, x, tokens: head_loss(params["head"], x, tokens),
    )
    params = lm.at_least_float32(params, config)

    def circular(params, tokens):
        return pipeline(config, params, tokens, comm, stages, loss_axes=config.axes)["loss"]

    if config.schedule == "1f1b":
        total = one_forward_one_backward.loss(config, params, tokens, comm, stages, AXIS, circular)
    else:
        total = circular(params, tokens)
    return total / (config.microbatches * config.ranks("data"))


def build(config, mesh, comm):
    """The training step; see models/lm/step.py."""
    _, shapes, _ = lm.structure(config)
    shapes = jax.eval_shape(lambda params: arrange(config, params), shapes)
    specs = jax.tree.map(lambda _: P(), shapes)
    specs["blocks"] = jax.tree.map(lambda _: P(None, AXIS), shapes["blocks"])

    return step.build(
        config, mesh, comm, loss, specs, loss_axes=config.axes, arrange=lambda params: arrange(config, params)
    )
