"""The schedule 1F1B in lockstep: each tick has the forward pass of one microbatch and the backward pass of another.

In tick t, stage i of p computes microbatch t - i forward and microbatch t - 2 (p - 1) + i backward. The last stage does
both for the same microbatch. A stage keeps the inputs of the microbatches that are between their two passes, 2 (p - 1)
+ 1 at most, instead of one input per tick. The backward pass recomputes the layers.

The loop computes the gradients itself, so it is the forward pass of a custom derivative.

Source: Narayanan et al., arXiv 2104.04473, in lockstep: all stages exchange after every tick.
"""

import jax
import jax.numpy as jnp


def loss(config, params, tokens, comm, stages, axis, evaluate):
    """Sum of the losses of this rank over all microbatches. Its derivative runs the schedule.

    Args:
      params: {"embed", "blocks", "head"} of this rank, as arrange() of models/pp/parallel.py stacks them; one round.
      tokens: sequences of this rank.
      stages: the work on a microbatch, Stages of models/pp/parallel.py; layers have no metrics.
      axis: mesh axis of the stages.
      evaluate: (params, tokens) -> the same loss, where no derivative is needed.
    """

    @jax.custom_vjp
    def total(params, tokens):
        return evaluate(params, tokens)

    def backward(grads, ct):
        return jax.tree.map(lambda g: (g * ct).astype(g.dtype), grads), None

    total.defvjp(lambda params, tokens: gradients(config, params, tokens, comm, stages, axis), backward)
    return total(params, tokens)


def gradients(config, params, tokens, comm, stages, axis):
    """(sum of the losses, gradients of the parameters)."""
    num_stages, count = config.ranks(axis), config.microbatches
    stage = jax.lax.axis_index(axis)
    tokens = tokens.reshape(count, -1, tokens.shape[1])  # (M, b, s + 1)
    precise = jnp.promote_types(config.dtype, jnp.float32)
    kept = 2 * (num_stages - 1) + 1  # inputs

    def zeros(shape, dtype):
        return jax.lax.pcast(jnp.zeros(shape, dtype), config.axes, to="varying")

    def forward(x, params, tokens):
        x = jax.lax.cond(stage == 0, lambda x, *args: stages.enter(*args), lambda x, *_: x, x, params, tokens)
        layers = jax.tree.map(lambda w: w[0, 0], params["blocks"])
        return jax.lax.scan(stages.layer, x, layers)[0]

    def with_loss(x, params, tokens):
        x = forward(x, params, tokens)
        last = stage == num_stages - 1
        return x, jax.lax.cond(last, stages.leave, lambda *_: zeros((), precise), params, x, tokens)

    def forward_and_backward(x, params, tokens, dx):
        (_, loss), pull = jax.vjp(lambda x, params: with_loss(x, params, tokens), x, params)
        return loss, *pull((dx, zeros((), precise) + 1))

    def nothing(x, params, *_):
        return zeros((), precise), *jax.tree.map(lambda x: zeros(x.shape, x.dtype), (x, params))

    def tick(carry, time):
        x, dx, inputs, total, grads = carry
        # Forward.
        item = time - stage
        number = jnp.clip(item, 0, count - 1)
        valid = (item >= 0) & (item < count)
        inputs = jnp.where(valid, jax.lax.dynamic_update_index_in_dim(inputs, x, number % kept, 0), inputs)
        # The last stage computes its layers once, in the backward pass.
        working = valid & (stage < num_stages - 1)
        x = jax.lax.cond(working, forward, lambda x, *_: x, x, params, tokens[number])
        # Backward.
        item = time - 2 * (num_stages - 1) + stage
        number = jnp.clip(item, 0, count - 1)
        valid = (item >= 0) & (item < count)
        loss, dx, own = jax.lax.cond(
            valid, forward_and_backward, nothing, inputs[number % kept], params, tokens[number], dx
        )
        total, grads = total + loss, jax.tree.map(lambda sum, g: sum + g.astype(sum.dtype), grads, own)
        if num_stages > 1:
            x = comm.ppermute(x, axis, [(source, (source + 1) % num_stages) for source in range(num_stages)])
            dx = comm.ppermute(dx, axis, [(source, (source - 1) % num_stages) for source in range(num_stages)])
        return (x, dx, inputs, total, grads), None

    shape = jax.eval_shape(stages.enter, params, tokens[0]).shape
    x = zeros(shape, config.dtype)
    sums = jax.tree.map(lambda w: zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), params)
    carry = (x, x, zeros((kept, *shape), config.dtype), zeros((), precise), sums)
    (_, _, _, total, grads), _ = jax.lax.scan(tick, carry, jnp.arange(count + 2 * (num_stages - 1)))
    return total, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, params)
