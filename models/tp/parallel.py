"""Tensor parallelism: every rank of a group holds a part of each matrix, and a part of each sequence between them.

Heads, hidden units and the vocabulary are divided among the t ranks of the axis "tensor". Between the layers, the
residual stream is divided by position, so each rank normalises and adds s / t positions only. The axis "data" divides
the sequences.

Sizes in the docstrings: b sequences of this rank, s bytes each, d width, h heads, f hidden units, v bytes in the
vocabulary.

Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053; sequence parallelism, Korthikanti et al., arXiv 2205.05198.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm import step
from ..lm.config import Config as BaseConfig
from ..lm.config import option

AXIS = "tensor"
# Parts of the parameters, by name. All others are equal on all ranks.
SPECS = {
    "embed": P(AXIS),  # (v, d)
    "q": P(None, AXIS),  # (d, h, d / h)
    "k": P(None, AXIS),
    "v": P(None, AXIS),
    "out": P(AXIS),  # (h, d / h, d)
    "gate": P(None, AXIS),  # (d, f)
    "up": P(None, AXIS),
    "down": P(AXIS),  # (f, d)
    "scores": P(None, AXIS),  # (d, v)
}


@dataclasses.dataclass(frozen=True)
class Config(BaseConfig):
    name = "tp"
    axes = ("data", AXIS)
    batch_axes = ("data",)
    free_on_resume = (*BaseConfig.free_on_resume, "layout", "matmul")

    layout: str = option("2x4", "sizes of the mesh axes data x tensor")
    matmul: str = option(
        "",
        'algorithm of the collective matmuls of jaxcomm; "" selects it by size',
        choices=("", "unfused", "ring"),
    )

    def __post_init__(self):
        super().__post_init__()
        self.check_divides((AXIS,), heads="heads", hidden="hidden units", seq="positions")
        ranks = self.ranks(AXIS)
        self.check(
            lm.VOCAB % ranks == 0, "layout", f"a size of {AXIS} that divides the {lm.VOCAB} bytes of the vocabulary"
        )

    def without_effect(self):
        of_lax = {"matmul": f"--comm {self.comm}"} if self.comm != "jaxcomm" else {}
        return super().without_effect() | of_lax | self.one_rank(AXIS, "matmul")


def attention(layer, x, comm, attend=lm.attend):
    """(b, s / t, d) -> (b, s / t, d): all positions, and the heads of this rank."""
    width, heads, size = layer.q.shape
    weights = tuple(w[...].reshape(width, heads * size) for w in (layer.q, layer.k, layer.v))
    products = comm.all_gather_matmul(x, weights, AXIS, axis=1)  # (b, s, h / t * d / h) each
    query, key, value = (y.reshape(*y.shape[:2], heads, size) for y in products)
    mixed = attend(query, key, value).reshape(products[0].shape)
    return comm.matmul_psum_scatter(mixed, layer.out[...].reshape(heads * size, width), AXIS, scatter_dimension=1)


def mlp(layer, x, comm):
    """(b, s / t, d) -> (b, s / t, d): all positions, and the hidden units of this rank."""
    gate, up = comm.all_gather_matmul(x, (layer.gate[...], layer.up[...]), AXIS, axis=1)
    return comm.matmul_psum_scatter(jax.nn.silu(gate) * up, layer.down[...], AXIS, scatter_dimension=1)


def embed(table, tokens, comm, dtype):
    """(v / t, d) and (b, s) -> (b, s / t, d). Each rank looks up the bytes whose rows it holds.

    The lookup is at least float32, as in models/lm. The sum is in the type --dtype.
    """
    table = table.astype(jnp.promote_types(dtype, jnp.float32))
    rows = table.shape[0]
    place = tokens - jax.lax.axis_index(AXIS) * rows
    mine = (place >= 0) & (place < rows)
    found = jnp.where(mine[:, :, None], table[jnp.where(mine, place, 0)], 0)
    return comm.psum_scatter(found.astype(dtype), AXIS, scatter_dimension=1, tiled=True)


def cross_entropy(scores, targets, comm):
    """(b, s, v / t) and (b, s) -> loss of each position, (b, s). No rank holds the scores of all bytes."""
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    largest = comm.pmax(jax.lax.stop_gradient(scores.max(-1)), AXIS)
    scores = scores - largest[:, :, None]
    rows = scores.shape[-1]
    place = targets - jax.lax.axis_index(AXIS) * rows
    mine = (place >= 0) & (place < rows)
    chosen = jnp.take_along_axis(scores, jnp.where(mine, place, 0)[:, :, None], axis=2)[:, :, 0]
    parts = jnp.stack([jnp.exp(scores).sum(-1), jnp.where(mine, chosen, 0)])
    total, target = comm.psum(parts, AXIS)
    return jnp.log(total) - target


def loss(config, model, tokens, comm):
    """Loss of the sequences of this rank, divided by the number of ranks along "data"."""
    x = embed(model.embed[...], tokens[:, :-1], comm, config.dtype)
    for block in model.blocks:
        x = x + attention(block.attention, block.attention_norm(x), comm)
        x = x + mlp(block.mlp, block.mlp_norm(x), comm)
    (scores,) = comm.all_gather_matmul(model.head.norm(x), (model.head.scores[...],), AXIS, axis=1)
    return cross_entropy(scores, tokens[:, 1:], comm).mean() / config.ranks("data")


def build(config, mesh, comm):
    """The training step; see models/lm/step.py."""
    _, shapes, _ = lm.structure(config)
    specs = jax.tree_util.tree_map_with_path(lambda path, _: SPECS.get(path[-1].key, P()), shapes)

    return step.build(config, mesh, comm, loss, specs, loss_axes=("data",))
