"""The experts of every choice, without drops: jaxcomm.moe and products whose cost follows the number of rows."""

import functools

import jax
import jax.numpy as jnp

from .config import AXES

# Rows of one product on CPUs. The groups of the experts are padded to multiples of it. With the default options, a
# training step with 128 takes less time than with 64 or 256 (two CPU cores, jax 0.10.2).
BLOCK = 128
SMALLEST = 8  # of a block, when few tokens share many experts


def experts_of_all(moe, x, expert, weight, up, down, *, ragged, axes=AXES):
    """Sends tokens to their experts, and adds the results.

    reduce="home" adds the gradients of a token in the order of its choices, so they have the same bits on every mesh.

    Args:
      moe: jaxcomm.moe.
      x: (t, d), tokens of this rank.
      expert, weight: (t, k), choices of each token.
      up, down: (m, d, f) and (m, f, d), the experts of this rank.
      ragged: use jax.lax.ragged_dot. On CPUs it multiplies every row by every expert of the rank.
      axes: mesh axes that share the experts.

    Returns:
      (t, d), and the number of choices that were dropped: always 0.

    Cost: dispatch and combine of k * t rows per rank.
    """
    ranks = jax.lax.axis_size(axes)
    experts = len(up) * ranks
    block = min(BLOCK, -(-expert.size * ranks // (experts * SMALLEST)) * SMALLEST)  # rows of an even load, if fewer
    # A program on a GPU cannot raise an error. Nothing is dropped there either: the default capacity is the worst case.
    options = {"on_overflow": "drop"} if ragged else {"align": block}
    routing = moe.route(expert, axes, num_experts=experts, reduce="home", **options)
    rows = moe.dispatch(x, routing)
    if ragged:
        hidden = jnp.square(jax.nn.relu(jax.lax.ragged_dot(rows, up, routing.group_sizes)))
        rows = jax.lax.ragged_dot(hidden, down, routing.group_sizes)
    else:
        rows = perceptrons_by_block(rows, routing.group_sizes, up, down, block)
    # combine could add the results too.
    chosen = jax.lax.optimization_barrier(moe.combine(rows, routing, per_choice=True))
    y = jnp.einsum("tkd,tk->td", chosen.astype(weight.dtype), weight).astype(x.dtype)
    return y, routing.dropped


def perceptron(x, up, down):
    """Two layers with squared ReLU: (..., d) -> (..., d)."""
    return jnp.square(jax.nn.relu(x @ up)) @ down


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def perceptrons_by_block(rows, sizes, up, down, block):
    """Applies each expert to its group of rows, block by block. Blocks after the last group cost nothing.

    A loop of a number of rounds that is known only at run time has no derivative in JAX, so this one has its own.

    Args:
      rows: (c, d), zero in and after the groups where there is no token; c is a multiple of ``block``.
      sizes: (m,), rows of each group, multiples of ``block``.
      up, down: (m, d, f) and (m, f, d).
      block: rows of a block.
    """

    def apply(i, y):
        start, expert = _find(sizes, i, block)
        x = jax.lax.dynamic_slice_in_dim(rows, start, block)
        return jax.lax.dynamic_update_slice_in_dim(y, perceptron(x, up[expert], down[expert]), start, 0)

    return jax.lax.fori_loop(0, sizes.sum() // block, apply, rows)


def _forward(rows, sizes, up, down, block):
    return perceptrons_by_block(rows, sizes, up, down, block), (rows, sizes, up, down)


def _backward(block, saved, ct):
    """Computes the hidden units again, because their array has as many rows as the worst case."""
    rows, sizes, up, down = saved

    def apply(i, sums):
        dx, dup, ddown = sums
        start, expert = _find(sizes, i, block)
        own_rows, own_ct = (jax.lax.dynamic_slice_in_dim(a, start, block) for a in (rows, ct))
        own, own_up, own_down = jax.vjp(perceptron, own_rows, up[expert], down[expert])[1](own_ct)
        dx = jax.lax.dynamic_update_slice_in_dim(dx, own, start, 0)
        return dx, dup.at[expert].add(own_up), ddown.at[expert].add(own_down)

    precise = jnp.promote_types(up.dtype, jnp.float32)
    zeros = [jnp.where(False, w, 0).astype(precise) for w in (up, down)]  # typed as varying over the axes of w
    dx, dup, ddown = jax.lax.fori_loop(0, sizes.sum() // block, apply, (ct, *zeros))
    return dx, None, dup.astype(up.dtype), ddown.astype(down.dtype)


perceptrons_by_block.defvjp(_forward, _backward)


def _find(sizes, i, block):
    """First row and expert of block i."""
    return i * block, (jnp.cumsum(sizes) <= i * block).sum()
