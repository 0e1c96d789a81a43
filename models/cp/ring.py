"""Ring attention: keys and values go around the ring of ranks, and each rank attends to the block that it has.

The result of each block is merged by its log-sum-exp, so no rank ever holds the scores of a whole sequence. The
derivative recomputes the scores of each block from the saved log-sum-exp. The gradients of keys and values travel with
their block, and arrive at its rank after n steps.

Sizes in the docstrings: b sequences, m = s / n positions of this rank, h heads, k features of a head.

Sources: Liu et al., arXiv 2310.01889; striped attention, Brandon et al., arXiv 2311.09431; the zigzag order is that of
the context parallelism of Llama 3, arXiv 2407.21783, and of ring-flash-attention.
"""

import jax
import jax.numpy as jnp


def block(query, key, value, mask):
    """Attention to one block: output (b, m, h, k) and log-sum-exp (b, h, m), both at least in float32.

    A position that sees nothing in the block has a log-sum-exp of -inf and an output of 0.
    """
    scores = scores_of(query, key, mask)
    largest = scores.max(-1)
    safe = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(scores - safe[..., None])
    total = weights.sum(-1)
    output = jnp.einsum("bhqs,bshk->bqhk", weights, value.astype(weights.dtype))
    output = output / jnp.where(total == 0, 1, total).swapaxes(1, 2)[..., None]
    return output, jnp.log(total) + safe


def scores_of(query, key, mask):
    precise = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key, preferred_element_type=precise) * query.shape[-1] ** -0.5
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def block_gradients(query, key, value, mask, lse, inner, ct):
    """Gradients of the block's query, key and value; inner is the sum of output * ct over features, (b, h, m)."""
    shares = jnp.exp(scores_of(query, key, mask) - lse[..., None])
    d_value = jnp.einsum("bhqs,bqhk->bshk", shares, ct)
    d_shares = jnp.einsum("bqhk,bshk->bhqs", ct, value.astype(ct.dtype))
    d_scores = shares * (d_shares - inner[..., None]) * query.shape[-1] ** -0.5
    d_query = jnp.einsum("bhqs,bshk->bqhk", d_scores, key.astype(ct.dtype))
    d_key = jnp.einsum("bhqs,bqhk->bshk", d_scores, query.astype(ct.dtype))
    return d_query, d_key, d_value


def merge(output, lse, part, part_lse):
    """Joins the attention to two sets of positions."""
    total = jnp.logaddexp(lse, part_lse)

    def scaled(x, own):
        return x * jnp.exp(own - total).swapaxes(1, 2)[..., None]

    return scaled(output, lse) + scaled(part, part_lse), total


class Ring:
    """Causal attention on a ring.

    Args:
      comm: jaxcomm or jax.lax.
      axis: mesh axis of the ring.
      positions: (n, m) array, the positions of each rank.
      order: "zigzag" or "striped"; see models/cp/parallel.py.
    """

    def __init__(self, comm, axis, positions, order):
        self.comm, self.axis, self.order = comm, axis, order
        self.positions = positions
        self.ranks, self.size = positions.shape

    def send(self, x):
        """Starts the transfer to the next rank of the ring; ``done()`` returns the array of the rank before."""
        pairs = [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]
        return self.comm.ppermute_start(x, self.axis, pairs)

    def visible(self, source):
        """Mask (m, m): which positions of rank ``source`` the positions of this rank see."""
        positions = jnp.asarray(self.positions)  # here: the derivative of a loop is traced after the loop
        own = positions[jax.lax.axis_index(self.axis)]
        return own[:, None] >= positions[source][None, :]

    def on_block(self, step, source, earlier, later, masked, *operands):
        """Calls the function for the visible part of the block of rank ``source``.

        In zigzag order, a block of an earlier rank is visible in its first half, to all positions; a block of a later
        rank is visible as a whole, to the second half of the positions. Both are half of the products.
        """
        if self.order != "zigzag" or step == 0:
            return masked(self.visible(source), *operands)
        return jax.lax.cond(source < jax.lax.axis_index(self.axis), earlier, later, *operands)

    def __call__(self, query, key, value):
        """(b, m, h, k) each, with rotary positions -> (b, m, h, k)."""
        attend = jax.custom_vjp(lambda *operands: self.forward(*operands)[0])
        attend.defvjp(self.forward, self.backward)
        return attend(query, key, value)

    def forward(self, query, key, value):
        half = self.size // 2
        me = jax.lax.axis_index(self.axis)

        def masked(mask, query, key, value):
            return block(query, key, value, mask)

        def earlier(query, key, value):
            return block(query, key[:, :half], value[:, :half], None)

        def later(query, key, value):
            output, lse = block(query[:, half:], key, value, None)
            before = ((0, 0), (half, 0), (0, 0), (0, 0))
            return jnp.pad(output, before), jnp.pad(lse, ((0, 0), (0, 0), (half, 0)), constant_values=-jnp.inf)

        pair, found = jnp.stack([key, value]), None
        for step in range(self.ranks):
            arriving = self.send(pair) if step + 1 < self.ranks else None  # beside the products of this step
            part = self.on_block(step, (me - step) % self.ranks, earlier, later, masked, query, *pair)
            found = part if found is None else merge(*found, *part)
            pair = arriving.done(after=part) if arriving else None
        output, lse = found
        return output.astype(query.dtype), (query, key, value, output, lse)

    def backward(self, saved, ct):
        query, key, value, output, lse = saved
        half = self.size // 2
        me = jax.lax.axis_index(self.axis)
        ct = ct.astype(output.dtype)
        inner = (output * ct).sum(-1).swapaxes(1, 2)

        def masked(mask, *operands):
            return block_gradients(*operands[:3], mask, *operands[3:])

        def pad(x, before, after):
            return jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0)))

        def earlier(query, key, value, lse, inner, ct):
            d_query, *rest = block_gradients(query, key[:, :half], value[:, :half], None, lse, inner, ct)
            return d_query, *(pad(x, 0, self.size - half) for x in rest)

        def later(query, key, value, lse, inner, ct):
            of_half = (lse[:, :, half:], inner[:, :, half:], ct[:, half:])
            d_query, *rest = block_gradients(query[:, half:], key, value, None, *of_half)
            return pad(d_query, half, 0), *rest

        pair, d_query, travelling = jnp.stack([key, value]), None, None
        for step in range(self.ranks):
            arriving = self.send(pair) if step + 1 < self.ranks else None
            source = (me - step) % self.ranks
            part, *rest = self.on_block(step, source, earlier, later, masked, query, *pair, lse, inner, ct)
            d_query = part if d_query is None else d_query + part
            own = jnp.stack(rest)
            # The sums of the ranks before arrive beside the products of this rank. After n transfers, a block's
            # gradients are at its rank.
            d_pair = own if travelling is None else travelling.done(after=(part, *rest)) + own
            travelling = self.send(d_pair)
            pair = arriving.done(after=(part, *rest)) if arriving else None
        d_key, d_value = travelling.done()
        return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)
