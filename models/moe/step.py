"""The training step as one jitted function: loss, gradient, exchange of tokens, sum of gradients, update.

Every device is a data-parallel rank and holds a share of the experts. ``comm`` is ``jaxcomm`` or ``jax.lax``. Tokens go
through ``jaxcomm.moe`` or ``all_to_all`` (in dropless.py and model.py), sums of gradients through ``psum``.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..lm import model as lm
from ..lm.step import Program, global_norm, make_optimizer, sum_gradients, vary
from .model import AXES, Transformer


def init_state(config):
    """Structure and partition of the training state, without computing it.

    Returns:
      graphdef: for nnx.merge.
      specs: PartitionSpecs of (parameters, optimiser state): P(AXES) for experts, P() for replicated arrays.
      init: function that creates (parameters, optimiser state), to be jitted. Parameters are a plain nested dict.
    """
    optimizer = make_optimizer(config)

    def split():
        return nnx.split(Transformer(config, nnx.Rngs(config.seed)), nnx.Param)

    def init():
        params = nnx.to_pure_dict(split()[1])
        return params, optimizer.init(params)

    graphdef, state = nnx.eval_shape(split)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(state))
    _, opt_shapes = jax.eval_shape(init)
    opt_specs = optax.tree_map_params(
        optimizer, lambda _, spec: spec, opt_shapes, specs, transform_non_params=lambda _: P()
    )
    return graphdef, (specs, opt_specs), init


def make_loss(config, graphdef, comm):
    """loss(params, tokens) of one rank -> (loss, metrics).

    ``tokens`` (b, seq + 1) int32. The losses of all ranks sum to the loss of the global batch: each is divided by the
    number of ranks. The gradient is that of the local loss, and all_to_all exchanges the cotangents between ranks.
    Hence the gradient of a replicated parameter is partial and must be summed over ranks. The gradient of an expert is
    complete, because it includes the tokens of all ranks.
    """

    def loss(params, tokens, capacity_factor):
        model = nnx.merge(graphdef, lm.cast_model(params, config))
        logits, stats = model(tokens[:, :-1], capacity_factor=capacity_factor, comm=comm)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        metrics = {"loss": nll, "balance": stats.balance, "dropped": stats.dropped}
        total = nll + config.balance * stats.balance
        return jax.tree.map(lambda x: x / config.ranks(), (total, metrics))

    return loss


def make_grads(config, graphdef, specs, comm):
    """grads(params, tokens) -> (gradient of the global loss, metrics of the global batch); inside shard_map."""
    loss = make_loss(config, graphdef, comm)

    def grads(params, tokens):
        local, metrics = jax.grad(loss, has_aux=True)(vary(params, specs, AXES), tokens, config.capacity)
        return sum_gradients(local, specs, AXES, comm), comm.psum(metrics, AXES)

    return grads


def make_step(config, mesh, graphdef, specs, comm, check_vma=True):
    """step(state, tokens) -> (state, metrics): the whole training step as one jitted function.

    ``state`` is (parameters, optimiser state), partitioned by ``specs``; the old state is donated. ``tokens`` is
    (batch, seq + 1) int32, with its sequences sharded over the ranks.
    """
    grads_of = make_grads(config, graphdef, specs[0], comm)
    optimizer = make_optimizer(config)

    def step(state, tokens):
        params, opt_state = state
        grads, metrics = grads_of(params, tokens)
        norm = global_norm(grads, specs[0], AXES, comm)
        grads = jax.tree.map(lambda x: x * jnp.minimum(1, config.clip / norm), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {**metrics, "grad_norm": norm}

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(specs, P()), check_vma=check_vma)
    return jax.jit(sharded, donate_argnums=0)


def make_eval(config, mesh, graphdef, specs, comm):
    """evaluate(params, tokens) -> metrics of the global batch, with the wider capacity of evaluation."""
    loss = make_loss(config, graphdef, comm)

    def evaluate(params, tokens):
        return comm.psum(loss(params, tokens, config.eval_capacity)[1], AXES)

    return jax.jit(jax.shard_map(evaluate, mesh=mesh, in_specs=(specs[0], P(AXES)), out_specs=P()))


def build(config, mesh, comm):
    """The program for the training loop of models/lm. Its evaluation returns all metrics."""
    graphdef, specs, init = init_state(config)
    evaluate = make_eval(config, mesh, graphdef, specs, comm)
    return Program(
        init=init,
        specs=specs,
        tokens=P(AXES),
        step=make_step(config, mesh, graphdef, specs, comm),
        evaluate=lambda state, tokens: evaluate(state[0], tokens),
        graphdef=graphdef,
    )
