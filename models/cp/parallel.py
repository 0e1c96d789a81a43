"""Context parallelism: each rank holds a part of every sequence, in all layers; only attention communicates.

The axis "context" divides the positions of a sequence among n ranks, the axis "data" divides the sequences. Three ways
to attend to positions of other ranks:

- ring: blocks of keys and values go around a ring (ring.py).
- ulysses: all_to_all exchanges parts of the sequence for heads, so each rank attends to all positions with h / n heads.
- gather: each rank gathers all keys and values.

With causal attention, late positions see more than early ones. Two orders of the positions give all ranks equal work:
"zigzag" cuts a sequence into 2 n chunks, of which rank r holds chunks r and 2 n - 1 - r. "striped" gives rank r the
positions r, r + n, r + 2 n and so on.

Sizes in the docstrings: b sequences of this rank, m = s / n positions of this rank, h heads, k features of a head.

Sources: ring attention, Liu et al., arXiv 2310.01889; Ulysses, Jacobs et al., arXiv 2309.14509; gather and zigzag,
Llama 3, arXiv 2407.21783; striped, Brandon et al., arXiv 2311.09431.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm import step
from ..lm.config import Config as BaseConfig
from ..lm.config import option
from .ring import Ring, block

AXIS = "context"


@dataclasses.dataclass(frozen=True)
class Config(BaseConfig):
    name = "cp"
    axes = ("data", AXIS)
    batch_axes = ("data",)
    free_on_resume = (*BaseConfig.free_on_resume, "attention", "order")

    layout: str = option("2x4", "sizes of the mesh axes data x context")
    attention: str = option("ring", "how ranks attend to other ranks", choices=("ring", "ulysses", "gather"))
    order: str = option("zigzag", "order of the positions on the ranks", choices=("zigzag", "striped"))

    def __post_init__(self):
        super().__post_init__()
        self.check_divides((AXIS,), seq="positions")
        if self.attention == "ulysses":
            self.check_divides((AXIS,), heads="heads")
        if self.order == "zigzag":
            chunks = 2 * self.ranks(AXIS)
            self.check(self.seq % chunks == 0, "seq", f"a multiple of {chunks}, the chunks of --order zigzag")

    def without_effect(self):
        return super().without_effect() | self.one_rank(AXIS, "attention", "order")


def positions_of(order, seq, ranks):
    """(n, m) positions of each rank."""
    if order == "striped":
        return np.arange(seq).reshape(-1, ranks).T
    chunks = np.arange(seq).reshape(2 * ranks, -1)
    return np.stack([np.concatenate([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)])


def ulysses(query, key, value, positions, comm):
    """(b, m, h, k) -> (b, m, h, k): all positions, h / n heads, and back."""

    def exchange(x, split_axis, concat_axis):
        return comm.all_to_all(x, AXIS, split_axis=split_axis, concat_axis=concat_axis, tiled=True)

    query, key, value = exchange(jnp.stack([query, key, value]), 3, 2)
    places = jnp.asarray(positions.reshape(-1))  # ranks in order, each with its positions
    output, _ = block(query, key, value, places[:, None] >= places[None, :])
    return exchange(output.astype(query.dtype), 1, 2)


def gather(query, key, value, positions, comm):
    """(b, m, h, k) -> (b, m, h, k), with the keys and values of all ranks."""
    key, value = comm.all_gather(jnp.stack([key, value]), AXIS, axis=2, tiled=True)
    own = jnp.asarray(positions)[jax.lax.axis_index(AXIS)]
    output, _ = block(query, key, value, own[:, None] >= positions.reshape(-1)[None, :])
    return output.astype(query.dtype)


def attend(config, query, key, value, positions, comm):
    """Causal attention of the positions of this rank to those of all ranks, (b, m, h, k) each."""
    own = jnp.asarray(positions)[jax.lax.axis_index(AXIS)]
    query, key = lm.rotate(query, own), lm.rotate(key, own)
    if config.attention == "ring":
        return Ring(comm, AXIS, positions, config.order)(query, key, value)
    return {"ulysses": ulysses, "gather": gather}[config.attention](query, key, value, positions, comm)


def loss(config, model, tokens, comm):
    """This rank's share of the loss: that of its positions of its sequences."""
    positions = positions_of(config.order, config.seq, config.ranks(AXIS))
    own = jnp.asarray(positions)[jax.lax.axis_index(AXIS)]
    x = lm.embed(model.embed[...], tokens[:, own], config.dtype)
    for layer in model.blocks:
        mixed = attend(config, *layer.attention.project(layer.attention_norm(x)), positions, comm)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, layer.attention.out[...])
        x = x + layer.mlp(layer.mlp_norm(x))
    return lm.cross_entropy(model.head(x), tokens[:, own + 1]).mean() / config.ranks()


def build(config, mesh, comm):
    """The training step; see models/lm/step.py. All ranks have all parameters."""
    _, shapes, _ = lm.structure(config)
    specs = jax.tree.map(lambda _: P(), shapes)

    return step.build(config, mesh, comm, loss, specs, loss_axes=config.axes)
