"""Data parallelism in four stages: which of optimiser state, gradients and parameters each rank holds in part only.

The parameters of a layer form one vector, which is padded and cut into n equal parts. Rank r updates part r. One
collective therefore moves a whole layer, and the optimiser, which is elementwise, runs on parts.

| stage | in parts | gradients | parameters |
|---|---|---|---|
| 0 | nothing | psum | complete on every rank |
| 1 | optimiser state | psum_scatter after the backward pass | all_gather before the forward pass |
| 2 | and gradients | psum_scatter of each layer in the backward pass | as 1 |
| 3 | and parameters | as 2 | all_gather of each layer, in the forward and in the backward pass |

With stage 3, the transfers of a layer run beside the computations of another: `prefetched`.

Sources: ZeRO, Rajbhandari et al., arXiv 1910.02054; FSDP, Zhao et al., arXiv 2304.11277; weight-update sharding, Xu et
al., arXiv 2004.13336.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm.config import Config as BaseConfig
from ..lm.config import option
from ..lm.step import learning_rate, make_program

AXES = ("node", "gpu")  # every device is a data-parallel rank


@dataclasses.dataclass(frozen=True)
class Config(BaseConfig):
    name = "zero"
    axes = AXES
    batch_axes = AXES
    free_on_resume = (*BaseConfig.free_on_resume, "stage")

    stage: int = option(3, "0: plain data parallelism; 1, 2, 3: stages of ZeRO", choices=(0, 1, 2, 3))
    layout: str = option("2x4", "sizes of the mesh axes node x gpu")


class Packing(NamedTuple):
    """Places of the arrays of a group of parameters in a vector: first vectors, then matrices, then padding."""

    shapes: Any  # a tree of arrays or shapes
    ranks: int  # the padded size is a multiple of this

    def places(self):
        """[(index of the leaf, start, stop)], and the padded size."""
        leaves = jax.tree.leaves(self.shapes)
        found, stop = [], 0
        for index in sorted(range(len(leaves)), key=lambda index: leaves[index].ndim > 1):
            start, stop = stop, stop + leaves[index].size
            found.append((index, start, stop))
        return found, -(-stop // self.ranks) * self.ranks

    def pack(self, tree):
        leaves = jax.tree.leaves(tree)
        places, size = self.places()
        vector = jnp.concatenate([leaves[index].reshape(-1) for index, _, _ in places])
        return jnp.pad(vector, (0, size - len(vector)))

    def unpack(self, vector):
        leaves, tree = jax.tree.flatten(self.shapes)
        places, _ = self.places()
        for index, start, stop in places:
            leaves[index] = vector[start:stop].reshape(leaves[index].shape)
        return jax.tree.unflatten(tree, leaves)

    def decays(self, position):
        """Whether AdamW decays the element at this position: it belongs to a matrix."""
        vectors = sum(x.size for x in jax.tree.leaves(self.shapes) if x.ndim <= 1)
        total = sum(x.size for x in jax.tree.leaves(self.shapes))
        return (position >= vectors) & (position < total)


def sum_to_part(x, comm, axes=AXES):
    """Sums complete vectors over the ranks, in float32; each rank gets its part of the last dimension."""
    precise = jnp.promote_types(x.dtype, jnp.float32)
    return comm.psum_scatter(x.astype(precise), axes, scatter_dimension=x.ndim - 1, tiled=True)


def gather(comm, dtype, axes=AXES):
    """Stage 3: part (..., m) -> complete vector (..., n * m). Its derivative sums and leaves each rank its part.

    The vector is sent in the type ``dtype``. The result is at least float32, so that all gradients of the vector are
    added in float32, on this rank and over the ranks.
    """

    @jax.custom_vjp
    def use(part):
        complete = comm.all_gather(part.astype(dtype), axes, axis=part.ndim - 1, tiled=True)
        return complete.astype(jnp.promote_types(dtype, jnp.float32))

    use.defvjp(
        lambda part: (use(part), None),
        lambda _, ct: (sum_to_part(ct, comm, axes),),
    )
    return use


def prefetched(layer, comm, dtype):
    """Stage 3: stack(x, parts) applies layer(x, vector) for all layers; parts (L, m) are those of this rank.

    | pass | beside the computations of layer i | in memory |
    |---|---|---|
    | forward | gather of layer i + 1 | inputs of layers, 2 complete layers |
    | backward | gather of layer i - 1, sum of the gradient of layer i + 1 | and 2 complete gradients |

    The backward pass recomputes each layer from its input. It begins with the last layer, which is still complete.
    """

    def start_gather(part, after):
        return comm.all_gather_start(part.astype(dtype), AXES, tiled=True, after=after)

    def start_sum(grad, after):
        precise = jnp.promote_types(grad.dtype, jnp.float32)
        return comm.psum_scatter_start(grad.astype(precise), AXES, scatter_dimension=0, tiled=True, after=after)

    def forward(x, parts):
        def body(carry, part):
            x, vector = carry
            following = start_gather(part, after=x)
            y = layer(x, vector)
            return (y, following.done(after=y)), x

        vector, inputs = start_gather(parts[0], after=x).done(), None
        if len(parts) > 1:
            (x, vector), inputs = jax.lax.scan(body, (x, vector), parts[1:])
        return layer(x, vector), (inputs, x, vector, parts)

    def derivative(x, vector, ct):
        return jax.vjp(layer, x, vector)[1](ct)

    def backward(saved, ct):
        inputs, x, vector, parts = saved

        def body(carry, layer_i):
            ct, vector, later = carry
            x, part = layer_i
            preceding, summed = start_gather(part, after=ct), start_sum(later, after=ct)
            ct, grad = derivative(x, vector, ct)
            return (ct, preceding.done(after=(ct, grad)), grad), summed.done(after=(ct, grad))

        sums = []  # of the gradients: layers 2 and later, layer 1, layer 0
        if len(parts) > 1:  # the last layer has no later one
            preceding = start_gather(parts[-2], after=ct)
            ct, grad = derivative(x, vector, ct)
            x, vector = inputs[0], preceding.done(after=(ct, grad))
            if len(parts) > 2:
                of_layers = (inputs[1:], parts[:-2])
                (ct, vector, grad), found = jax.lax.scan(body, (ct, vector, grad), of_layers, reverse=True)
                sums.append(found)
            summed = start_sum(grad, after=ct)
        ct, grad = derivative(x, vector, ct)  # layer 0 has no preceding one
        if len(parts) > 1:
            sums.append(summed.done(after=(ct, grad))[None])
        sums.append(start_sum(grad, after=()).done()[None])
        return ct, jnp.concatenate(sums[::-1])

    stack = jax.custom_vjp(lambda x, parts: forward(x, parts)[0])
    stack.defvjp(forward, backward)
    return stack


def scatter_gradient(comm):
    """Stage 2: the complete vector, which is there already, with the derivative of stage 3 for the part."""

    @jax.custom_vjp
    def use(part, complete):
        return complete

    use.defvjp(
        lambda part, complete: (complete, None),
        lambda _, ct: (sum_to_part(ct, comm), None),
    )
    return lambda pair: use(*pair)


def make_loss(config, packings, comm):
    """loss(vectors, tokens, use) -> this rank's share of the loss; use(vector) is complete, of any type."""
    block, _, _ = lm.structure(config, lm.Block)
    head, _, _ = lm.structure(config, lm.Head)

    def loss(vectors, tokens, use):
        def layer(x, vector):
            return nnx.merge(block, lm.cast(packings["blocks"].unpack(vector), config))(x)

        x = lm.embed(packings["embed"].unpack(use(vectors["embed"])), tokens[:, :-1], config.dtype)
        if config.stage == 3:
            x = prefetched(layer, comm, config.dtype)(x, vectors["blocks"])
        else:
            # Keeps products. With all intermediate values, the loop would also keep copies of the parameters.
            body = jax.checkpoint(
                lambda x, vector: (layer(x, use(vector)), None), policy=jax.checkpoint_policies.dots_saveable
            )
            x, _ = jax.lax.scan(body, x, vectors["blocks"])
        scores = nnx.merge(head, lm.cast(packings["head"].unpack(use(vectors["head"])), config))(x)
        return lm.cross_entropy(scores, tokens[:, 1:]).mean() / config.ranks()

    return loss


class Stage:
    """Loss and gradients of a stage, inside shard_map. ``vectors`` are parts; with stage 0 they are complete."""

    def __init__(self, config, packings, comm):
        self.config, self.comm, self.local_loss = config, comm, make_loss(config, packings, comm)

    def complete(self, vectors):
        """All vectors, complete. With stages 1 and 2, they are in the type --dtype, but for the embedding."""
        if self.config.stage == 0:
            return vectors
        found = {
            name: self.comm.all_gather(x.astype(self.config.dtype), AXES, axis=x.ndim - 1, tiled=True)
            for name, x in vectors.items()
        }
        return {**found, "embed": lm.at_least_float32(found["embed"], self.config)}

    def loss(self, vectors, tokens):
        """{"loss"} of the batch, without gradients."""
        if self.config.stage == 3:
            value = self.local_loss(vectors, tokens, gather(self.comm, self.config.dtype))
        else:
            value = self.local_loss(self.complete(vectors), tokens, lambda x: x)
        return {"loss": self.comm.psum(value, AXES)}

    def gradients(self, vectors, tokens):
        """({"loss"} of the batch, gradients of the batch): of parts, or with stage 0 of complete vectors."""
        value, grads = getattr(self, f"_stage_{self.config.stage}")(vectors, tokens)
        return {"loss": self.comm.psum(value, AXES)}, grads

    def _stage_0(self, vectors, tokens):
        # Typed as varying: otherwise, the derivative of shard_map sums the gradients with jax.lax.
        vectors = jax.tree.map(lambda x: jax.lax.pcast(x, AXES, to="varying"), vectors)
        value, grads = jax.value_and_grad(self.local_loss)(vectors, tokens, lambda x: x)
        return value, self.comm.psum(grads, AXES)

    def _stage_1(self, vectors, tokens):
        value, grads = jax.value_and_grad(self.local_loss)(self.complete(vectors), tokens, lambda x: x)
        return value, {name: sum_to_part(x, self.comm) for name, x in grads.items()}

    def _stage_2(self, vectors, tokens):
        complete, use = self.complete(vectors), scatter_gradient(self.comm)

        def loss(vectors):
            return self.local_loss({name: (x, complete[name]) for name, x in vectors.items()}, tokens, use)

        return jax.value_and_grad(loss)(vectors)

    def _stage_3(self, vectors, tokens):
        return jax.value_and_grad(self.local_loss)(vectors, tokens, gather(self.comm, self.config.dtype))


def build(config, mesh, comm):
    """The training step. Vectors are P(AXES) in all stages but 0, so a run may be resumed with another stage."""
    ranks = config.ranks()
    _, shapes, init_params = lm.structure(config)
    packings = {
        "embed": Packing(shapes["embed"], ranks),
        "blocks": Packing(shapes["blocks"][0], ranks),  # all layers have the same shapes
        "head": Packing(shapes["head"], ranks),
    }
    in_parts = config.stage > 0
    specs = {"embed": P(AXES), "blocks": P(None, AXES), "head": P(AXES)}
    specs = specs if in_parts else jax.tree.map(lambda _: P(), specs)
    stage = Stage(config, packings, comm)

    def part(x):
        """Part of this rank along the last dimension."""
        size = x.shape[-1] // ranks
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXES) * size, size, axis=-1)

    def decay(updates, params):
        """Weight decay of matrices."""

        def leaf(update, param, packing):
            size = param.shape[-1]
            first = jax.lax.axis_index(AXES) * size if in_parts else 0
            rate = config.weight_decay * packing.decays(first + jnp.arange(size))
            return update + rate * param

        return {name: leaf(updates[name], params[name], packings[name]) for name in updates}

    optimizer = optax.chain(
        optax.scale_by_adam(b2=0.95),
        optax.stateless(decay),
        optax.scale_by_learning_rate(learning_rate(config)),
    )

    def init():
        params = init_params()
        vectors = {name: packings[name].pack(params[name]) for name in ("embed", "head")}
        blocks = [packings["blocks"].pack(params["blocks"][i]) for i in range(config.layers)]
        vectors["blocks"] = jnp.stack(blocks)
        return vectors, optimizer.init(vectors)

    def norm(grads):
        # Stage 0 sums parts too, so that all stages round alike.
        parts = jax.tree.map(lambda x: jnp.sum(jnp.square(x if in_parts else part(x))), grads)
        return jnp.sqrt(comm.psum(sum(jax.tree.leaves(parts)), AXES))

    return make_program(config, mesh, init, specs, optimizer, stage.gradients, norm, stage.loss)
