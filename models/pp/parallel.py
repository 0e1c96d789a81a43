"""Pipeline parallelism: each rank of the axis "pipe" is a stage, which holds some of the layers.

The sequences of a group are cut into M microbatches, which pass the p stages one after the other. In tick t, stage i
works on item k = t - i, which is microbatch k % M in round k // M. With several rounds, a microbatch passes all stages
again with other layers ("circular"): a stage then waits p - 1 of v * M + p - 1 ticks.

The derivative of the loop runs the ticks in reverse order and sends the gradients back.

Sizes in the docstrings: b sequences of a microbatch, s bytes each, d width, v rounds.

Sources: GPipe, Huang et al., arXiv 1811.06965; several rounds (interleaving), Narayanan et al., arXiv 2104.04473.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm import step
from ..lm.config import Config as BaseConfig
from ..lm.config import option

AXIS = "pipe"


@dataclasses.dataclass(frozen=True)
class Config(BaseConfig):
    name = "pp"
    axes = (AXIS, "data")
    batch_axes = ("data",)
    free_on_resume = (*BaseConfig.free_on_resume, "microbatches")

    layout: str = option("4x2", "sizes of the mesh axes pipe x data")
    layers: int = option(8, "transformer blocks")
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


def arrange(config, params):
    """Stacks the layers: (v, p, layers / (v * p), ...). Layer l is in round l // (p * layers per stage)."""
    stages = config.ranks(AXIS)

    def stack(*leaves):
        return jnp.stack(leaves).reshape(config.rounds, stages, -1, *leaves[0].shape)

    blocks = jax.tree.map(stack, *(params["blocks"][i] for i in range(config.layers)))
    return {"embed": params["embed"], "blocks": blocks, "head": params["head"]}


def loss(config, params, tokens, comm):
    """This rank's share of the loss: not zero on the last stage only."""
    block, _, _ = lm.structure(config, lm.Block)
    head, _, _ = lm.structure(config, lm.Head)
    stages, rounds, count = config.ranks(AXIS), config.rounds, config.microbatches
    stage = jax.lax.axis_index(AXIS)
    tokens = tokens.reshape(count, -1, tokens.shape[1])  # (M, b, s + 1)
    layers = jax.tree.map(lambda x: x[:, 0], params["blocks"])  # (v, layers of a stage, ...), those of this stage

    precise = jnp.promote_types(config.dtype, jnp.float32)

    def work(x, layers, number):
        own = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False), layers)
        return jax.lax.scan(lambda x, w: (nnx.merge(block, w)(x), None), x, own)[0]

    def of_microbatch(x, params, targets):
        return lm.cross_entropy(nnx.merge(head, params)(x), targets).mean()

    # Keeps the input of a tick; the backward pass recomputes the layers. Inside the two conds, it would keep the
    # weights of each tick too: the conds would return them.
    @jax.checkpoint
    def compute(x, layers, head_params, targets, number, valid, last):
        x = jax.lax.cond(valid, work, lambda x, *_: x, x, layers, number)
        own = jax.lax.cond(last, of_microbatch, lambda x, *_: 0 * x.sum().astype(precise), x, head_params, targets)
        return x, own

    def tick(carry, time):
        received, waiting, total = carry
        # The first stage keeps what the last one has sent until its next round.
        place = (time - stages) % count
        kept = jax.lax.dynamic_update_index_in_dim(waiting, received, place, 0)
        waiting = jnp.where(time >= stages, kept, waiting)
        item = time - stage
        valid = (item >= 0) & (item < rounds * count)
        item = jnp.clip(item, 0, rounds * count - 1)
        number, micro = item // count, item % count
        own = jax.lax.dynamic_index_in_dim(tokens, micro, keepdims=False)
        new = jnp.where(number == 0, params["embed"][own[:, :-1]], waiting[micro])
        x = jnp.where(stage == 0, new, received)
        last = valid & (stage == stages - 1) & (number == rounds - 1)
        x, own_loss = compute(x, layers, params["head"], own[:, 1:], number, valid, last)
        total += own_loss
        following = [(source, (source + 1) % stages) for source in range(stages)]
        return (comm.ppermute(x, AXIS, following), waiting, total), None

    shape = (*tokens[0, :, 1:].shape, params["embed"].shape[1])
    zero = 0 * params["embed"].sum()  # typed as varying over all axes
    carry = (
        jnp.zeros(shape, config.dtype) + zero,
        jnp.zeros((count, *shape), config.dtype) + zero,
        zero.astype(precise),
    )
    (_, _, total), _ = jax.lax.scan(tick, carry, jnp.arange(rounds * count + stages - 1))
    return total / (count * config.ranks("data"))


def build(config, mesh, comm):
    """The training step; see models/lm/step.py."""
    _, shapes, _ = lm.structure(config)
    shapes = jax.eval_shape(lambda params: arrange(config, params), shapes)
    specs = jax.tree.map(lambda _: P(), shapes)
    specs["blocks"] = jax.tree.map(lambda _: P(None, AXIS), shapes["blocks"])

    def of_rank(params, tokens, comm):
        return loss(config, params, tokens, comm)

    return step.build(
        config, mesh, comm, of_rank, specs, loss_axes=config.axes, arrange=lambda params: arrange(config, params)
    )
