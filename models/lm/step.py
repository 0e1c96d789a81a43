"""Optimiser, and the training step of all scripts that give the loss of a rank and the partition of the parameters."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from . import model as lm


class Program(NamedTuple):
    """A script, compiled for a mesh by its ``build(config, mesh, comm)``. The training loop needs no more."""

    init: Callable  # () -> state, on one device
    specs: Any  # PartitionSpec of each array of the state
    tokens: P  # PartitionSpec of the tokens, (batch, seq + 1)
    step: Callable  # (state, tokens) -> (state, {"loss", "grad_norm"}); donates the old state
    evaluate: (
        Callable  # (parameters, tokens) -> {"loss"} of the batch, nats per byte; with build(evaluation=), all losses
    )
    gradients: Callable | None = None  # (parameters, tokens) -> (loss, gradients of the whole batch); for tests
    graphdef: Any = None  # for nnx.merge with the parameters, of a Program of build()


def learning_rate(config):
    """Linear warm-up, then a cosine. The first step has a rate above 0."""
    rate = optax.warmup_cosine_decay_schedule(0, config.lr, config.warmup, config.decay_steps, config.lr / 20)
    return lambda count: rate(count + 1)


def make_optimizer(config):
    """AdamW. It is elementwise, so it also works on shards. Only matrices have weight decay, not the scales of norms.

    A script may stack the scales of several layers, so the mask goes by name.
    """
    return optax.adamw(
        learning_rate(config),
        b2=0.95,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params),
    )


def sharded_axes(spec):
    """The mesh axes that a PartitionSpec names."""
    return {axis for part in spec for axis in (part if isinstance(part, tuple) else (part,)) if axis is not None}


def missing_axes(spec, axes):
    """The mesh axes over which an array with this spec is replicated, in the order of ``axes``."""
    return tuple(axis for axis in axes if axis not in sharded_axes(spec))


def vary(params, specs, axes):
    """Types replicated parameters as varying: otherwise, the derivative of shard_map sums gradients with jax.lax."""
    return jax.tree.map(lambda x, spec: jax.lax.pcast(x, missing_axes(spec, axes), to="varying"), params, specs)


def sum_gradients(grads, specs, axes, comm):
    """Sums each gradient over the axes on which its parameter is replicated, with one psum per set of axes.

    The gradients of a set travel as one vector. All sums are started before the first one is needed.
    """
    leaves, tree = jax.tree.flatten(grads)
    missing = [missing_axes(spec, axes) for spec in jax.tree.leaves(specs)]
    started = []
    for group in sorted(set(missing) - {()}):
        places = [place for place, own in enumerate(missing) if own == group]
        flat = jnp.concatenate([leaves[place].reshape(-1) for place in places])
        started.append((places, comm.psum_start(flat, group)))
    for places, pending in started:
        parts = jnp.split(pending.done(), np.cumsum([leaves[place].size for place in places])[:-1])
        for place, part in zip(places, parts, strict=True):
            leaves[place] = part.reshape(leaves[place].shape)
    return jax.tree.unflatten(tree, leaves)


def global_norm(grads, specs, axes, comm):
    """Norm of the gradient of the whole model: squares of sharded gradients are summed over the ranks.

    Ranks are numbered in the order of ``axes``. So on one node, with --psum direct, the bits do not depend on the sizes
    of the axes. On several nodes, another algorithm adds (models/lm/comm.py).
    """
    squares = collections.defaultdict(float)
    for x, spec in zip(jax.tree.leaves(grads), jax.tree.leaves(specs), strict=True):
        squares[tuple(axis for axis in axes if axis in sharded_axes(spec))] += jnp.sum(jnp.square(x))
    return jnp.sqrt(sum(comm.psum(value, own) if own else value for own, value in sorted(squares.items())))


def make_program(config, mesh, init, specs, optimizer, gradients, norm, evaluate, **others):
    """Makes a Program from functions inside shard_map.

    Args:
      init: () -> (parameters, state of ``optimizer``), on one device.
      specs: PartitionSpecs of the parameters.
      gradients: (parameters, tokens) -> (metrics of the batch, gradients of the batch).
      norm: gradients -> norm of the gradient of the whole model.
      evaluate: (parameters, tokens) -> the result of Program.evaluate.
      others: other fields of Program.
    """
    state_specs = (
        specs,
        optax.tree_map_params(
            optimizer,
            lambda _, spec: spec,
            jax.eval_shape(init)[1],
            specs,
            transform_non_params=lambda _: P(),
        ),
    )
    tokens_spec = P(config.batch_axes)

    def loss_and_gradients(params, tokens):
        values, grads = gradients(params, tokens)
        return values["loss"], grads

    def step(state, tokens):
        params, opt_state = state
        values, grads = gradients(params, tokens)
        length = norm(grads)
        grads = jax.tree.map(lambda x: x * jnp.minimum(1, config.clip / length), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {**values, "grad_norm": length}

    def on_mesh(f, outputs, inputs=state_specs, **options):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(inputs, tokens_spec), out_specs=outputs), **options)

    return Program(
        init=init,
        specs=state_specs,
        tokens=tokens_spec,
        step=on_mesh(step, (state_specs, P()), donate_argnums=0),
        evaluate=on_mesh(evaluate, P(), specs),
        gradients=on_mesh(loss_and_gradients, (P(), specs), specs),
        **others,
    )


def build(
    config, mesh, comm, loss, specs, loss_axes, *, module=lm.Transformer, arrange=None, weights=None, evaluation=None
):
    """Makes the Program of a script.

    Args:
      loss: loss(config, model, tokens, comm) of this rank, inside shard_map. The losses of the ranks along
        ``loss_axes`` add up to the loss of the batch. Along other axes, all ranks have the same value, typed as such.
        A dict of several losses must have "loss", that of the prediction.
      specs: PartitionSpecs of the parameters, a dict like the parameters.
      loss_axes: mesh axes; with several losses a dict.
      module: the model on one device.
      arrange: function of the parameters, for scripts that hold them in another form. ``loss`` then gets this form in
        place of the model, in the type of the optimiser.
      weights: of each loss in the sum that is minimised, by name.
      evaluation: the losses of Program.evaluate; by default only the "loss" of training.
    """
    graphdef, _, init_params = lm.structure(config, module)
    plain, arrange = arrange is None, arrange or (lambda params: params)
    axes_of = loss_axes if isinstance(loss_axes, dict) else {"loss": loss_axes}
    optimizer = make_optimizer(config)

    def local_losses(params, tokens, loss=loss):
        model = nnx.merge(graphdef, lm.cast_model(params, config)) if plain else params
        found = loss(config, model, tokens, comm)
        return found if isinstance(loss_axes, dict) else {"loss": found}

    def weight(name, value):
        """The cotangent of a loss, of its type: a sum of losses that vary over other axes would be one of jax.lax."""
        one = jnp.full((), 1.0 if weights is None else weights[name], value.dtype)
        return jax.lax.pcast(one, axes_of[name], to="varying")

    def total(values):
        """One psum per set of axes."""
        found = {}
        for axes in dict.fromkeys(axes_of.values()):
            found |= comm.psum({name: x for name, x in values.items() if axes_of[name] == axes}, axes)
        return found

    def gradients(params, tokens):
        values, pull = jax.vjp(lambda params: local_losses(params, tokens), vary(params, specs, config.axes))
        (grads,) = pull({name: weight(name, value) for name, value in values.items()})
        return total(values), sum_gradients(grads, specs, config.axes, comm)

    def init():
        params = arrange(init_params())
        return params, optimizer.init(params)

    def norm(grads):
        return global_norm(grads, specs, config.axes, comm)

    def evaluate(params, tokens):
        values = local_losses(vary(params, specs, config.axes), tokens, evaluation or loss)
        return total(values) if evaluation else {"loss": comm.psum(values["loss"], axes_of["loss"])}

    return make_program(config, mesh, init, specs, optimizer, gradients, norm, evaluate, graphdef=graphdef)
