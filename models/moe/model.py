"""Decoder-only transformer over bytes whose feed-forward layers are mixtures of experts, in Flax NNX.

The same code runs on one device and inside ``jax.shard_map`` over ``AXES``. On one device, ``comm`` is None and the
device holds all experts. Inside shard_map, ``comm`` is ``jaxcomm`` or ``jax.lax``, and each rank holds its tokens and
its share of the experts. There are two ways for tokens to reach their experts, see ``MoE``.

Sizes in the docstrings: b sequences, s bytes each, t = b * s tokens of this rank, d width, e experts in all,
n ranks, c slots per expert and rank, f hidden units.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..lm.model import VOCAB, embed, rotate
from .config import AXES
from .dropless import experts_of_all, perceptron

TOP_K = 2  # experts per token


class Stats(NamedTuple):
    """Statistics of the routing of a layer; scalars."""

    balance: jax.Array  # load-balancing loss, 1 when the load is even
    dropped: jax.Array  # share of the t * TOP_K choices that had no slot at their expert


class Routing(NamedTuple):
    """Slots of the tokens. Slot j of expert i has index i * c + j. Index e * c means "dropped"."""

    slot: jax.Array  # (t, TOP_K) slot of each choice
    token: jax.Array  # (e * c,) the token in each slot; t means an empty slot
    weight: jax.Array  # (t, TOP_K) weight of each choice in the token's result
    stats: Stats


def slots_per_expert(num_tokens, experts, factor):
    """Slots per rank and expert: ``factor`` times an even load. With None, no token is dropped."""
    if factor is None:
        return num_tokens  # a token chooses an expert at most once
    return min(num_tokens, math.ceil(factor * TOP_K * num_tokens / experts))


class Choices(NamedTuple):
    """The experts of each token."""

    expert: jax.Array  # (t, TOP_K) int32
    weight: jax.Array  # (t, TOP_K) weight of each choice in the token's result
    balance: jax.Array  # load-balancing loss


def choose(logits):
    """Chooses two experts per token. Their weights are the router's probabilities, scaled to sum to 1.

    Args:
      logits: (t, e) scores of the router, at least float32.

    Sources: top-2 gating, GShard, arXiv 2006.16668, algorithm 1 (without its random dispatch of second choices);
    balancing loss, Switch Transformer, arXiv 2101.03961, equations 4 to 6.
    """
    experts = logits.shape[1]
    probs = jax.nn.softmax(logits)
    weight, expert = jax.lax.top_k(probs, TOP_K)
    weight /= weight.sum(-1, keepdims=True)
    # Product of the share of tokens whose first choice is expert i and i's mean probability; only the latter has a
    # gradient. Each rank balances its own tokens (a "group" in GShard), so no communication is needed.
    load = (expert[:, :1] == jnp.arange(experts)).mean(0, dtype=logits.dtype)
    return Choices(expert, weight, experts * jnp.sum(load * probs.mean(0)))


def route(choices, experts, capacity):
    """Assigns a slot at its expert to each choice of this rank.

    First choices get slots before second choices, each in the order of the tokens. A choice is dropped if its expert
    has no free slot; the token then passes the layer through the residual connection.

    Args:
      choices: of choose().
      experts: e, static.
      capacity: c, static.

    Returns:
      Routing.

    Source: capacity, GShard, arXiv 2006.16668, algorithm 1.
    """
    expert, num_tokens = choices.expert, len(choices.expert)
    order = expert.T.reshape(-1)  # first choices of all tokens, then second ones
    onehot = order[:, None] == jnp.arange(experts)
    place = jnp.cumsum(onehot, axis=0, dtype=jnp.int32) - 1  # earlier choices of the same expert
    place = jnp.take_along_axis(place, order[:, None], axis=1)[:, 0]
    slot = jnp.where(place < capacity, order * capacity + place, experts * capacity)
    slot = slot.reshape(TOP_K, num_tokens).T

    ids = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), TOP_K)
    token = jnp.full(experts * capacity, num_tokens, jnp.int32).at[slot.reshape(-1)].set(ids, mode="drop")
    dropped = jnp.mean(slot == experts * capacity, dtype=jnp.float32)
    return Routing(slot, token, choices.weight, Stats(choices.balance, dropped))


def take_rows(x, index):
    """Rows ``index`` (m,) of ``x`` (rows, d), zeros where the index is past the end: (m, d).

    On two CPU cores, a training step with this gather takes 0.8 times as long as with the one-hot product of GShard. A
    derivative written as a gather instead of JAX's scatter-add was not faster (default options, jax 0.10.2).
    """
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


class MoE(nnx.Module):
    """Mixture of e two-layer perceptrons with squared ReLU (Primer, arXiv 2109.08668).

    ``--moe capacity``: an expert has c slots for each rank, and a choice without a slot is dropped. ``--moe dropless``:
    every choice is computed, by jaxcomm.moe. With jax.lax, and on one device, dropless means c = t.
    """

    def __init__(self, config, rngs):
        experts, width, hidden = config.experts, config.width, config.hidden
        self.dropless = config.moe == "dropless"
        self.ragged = config.platform != "cpu"
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (width, experts)))
        self.up = nnx.Param(init(rngs.params(), (experts, width, hidden)))
        self.down = nnx.Param(init(rngs.params(), (experts, hidden, width)) / math.sqrt(2 * config.layers))

    def __call__(self, x, capacity_factor, comm, axes=AXES):
        """(t, d) -> (t, d) and Stats. The ranks along ``axes`` share the experts."""
        precise = jnp.promote_types(x.dtype, jnp.float32)
        choices = choose(x.astype(precise) @ self.router.astype(precise))
        if not self.dropless:
            return self.with_capacity(x, choices, capacity_factor, comm, axes)
        if not hasattr(comm, "moe"):
            return self.with_capacity(x, choices, None, comm, axes)
        weights = self.up[...], self.down[...]
        y, dropped = experts_of_all(
            comm.moe, x, choices.expert, choices.weight, *weights, ragged=self.ragged, axes=axes
        )
        return y, Stats(choices.balance, dropped.astype(jnp.float32) / choices.expert.size)

    def with_capacity(self, x, choices, capacity_factor, comm, axes=AXES):
        """Cost: two all_to_all of e * c * d elements per rank."""
        num_tokens, width = x.shape
        experts = self.router.shape[1]
        capacity = slots_per_expert(num_tokens, experts, capacity_factor)
        routing = route(choices, experts, capacity)

        # Dispatch: block i of the e * c slots goes to the rank of expert i, which gets the slots of all ranks.
        slots = take_rows(x, routing.token).reshape(experts, capacity, width)
        if comm is not None:
            slots = comm.all_to_all(slots, axes, split_axis=0, concat_axis=1, tiled=True)  # (e / n, n * c, d)
        slots = perceptron(slots, self.up[...], self.down[...])
        if comm is not None:
            slots = comm.all_to_all(slots, axes, split_axis=1, concat_axis=0, tiled=True)  # (e, c, d), as before

        # Combine: take the results of both choices; the result of a dropped choice is zero.
        chosen = take_rows(slots.reshape(-1, width), routing.slot.reshape(-1))
        weight = routing.weight.astype(x.dtype)
        return jnp.einsum("tkd,tk->td", chosen.reshape(num_tokens, TOP_K, width), weight), routing.stats


class Cache(NamedTuple):
    """Keys and values of the last w positions of a layer, (b, w, heads, head_dim). Position i is in row i % w."""

    key: jax.Array
    value: jax.Array


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions (Vaswani et al., arXiv 1706.03762)."""

    def __init__(self, config, rngs):
        self.heads = config.heads
        scaled = nnx.initializers.variance_scaling(1 / (2 * config.layers), "fan_in", "truncated_normal")
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, kernel_init=scaled, rngs=rngs)

    def __call__(self, x):
        """(b, s, d) -> (b, s, d)."""
        batch, seq, width = x.shape
        query, key, value = jnp.split(self.qkv(x).reshape(batch, seq, 3 * self.heads, -1), 3, axis=2)
        positions = jnp.arange(seq)
        mixed = jax.nn.dot_product_attention(rotate(query, positions), rotate(key, positions), value, is_causal=True)
        return self.out(mixed.reshape(batch, seq, width))

    def append(self, x, place, cache):
        """(b, d), the token at position ``place`` of each sequence -> (b, d), and the cache with it.

        It attends to the last w positions, the size of the cache.
        """
        batch, width = x.shape
        window = cache.key.shape[1]
        query, key, value = jnp.split(self.qkv(x).reshape(batch, 1, 3 * self.heads, -1), 3, axis=2)
        row, position = place % window, jnp.full(1, place)
        cache = Cache(cache.key.at[:, row].set(rotate(key, position)[:, 0]), cache.value.at[:, row].set(value[:, 0]))
        written = jnp.arange(window)[None, None, None] <= place
        mixed = jax.nn.dot_product_attention(rotate(query, position), *cache, mask=written)
        return self.out(mixed.reshape(batch, width)), cache


class Block(nnx.Module):
    """Attention, then experts; each has a normalised input and a residual connection."""

    def __init__(self, config, rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.moe_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.moe = MoE(config, rngs)

    def __call__(self, x, capacity_factor, comm):
        """(b, s, d) -> (b, s, d) and Stats."""
        x = x + self.attention(self.attention_norm(x))
        mixed, stats = self.moe(self.moe_norm(x).reshape(-1, x.shape[-1]), capacity_factor, comm)
        return x + mixed.reshape(x.shape), stats

    def append(self, x, place, cache, comm):
        """(b, d) and Cache -> (b, d) and Cache."""
        mixed, cache = self.attention.append(self.attention_norm(x), place, cache)
        x = x + mixed
        return x + self.moe(self.moe_norm(x), None, comm)[0], cache


class Transformer(nnx.Module):
    """Predicts the next byte."""

    def __init__(self, config, rngs):
        # Holds the table and the type of the activations. Its own lookup would cast the table first.
        self.embed = nnx.Embed(VOCAB, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens, *, capacity_factor=None, comm=None):
        """Returns the scores of the byte that follows each position.

        Args:
          tokens: (b, s) int32; those of this rank.
          capacity_factor: slots per expert relative to an even load; None means that no token is dropped.
          comm: ``jaxcomm`` or ``jax.lax`` inside shard_map over ``AXES``; None when all experts are on this device.

        Returns:
          logits (b, s, VOCAB) float32, and Stats averaged over the layers.
        """
        x = embed(self.embed.embedding[...], tokens, self.embed.dtype)
        stats = []
        for block in self.blocks:
            x, layer_stats = block(x, capacity_factor, comm)
            stats.append(layer_stats)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logits, jax.tree.map(lambda *values: sum(values) / len(values), *stats)

    def caches(self, batch, window):
        """Empty caches, one per layer."""
        heads, head_dim = self.blocks[0].attention.heads, self.embed.features // self.blocks[0].attention.heads
        zeros = jnp.zeros((batch, window, heads, head_dim), self.embed.dtype)
        return [Cache(zeros, zeros) for _ in self.blocks]

    def append(self, tokens, place, caches, comm):
        """Reads one byte per sequence, (b,), at position ``place``. Returns the scores of the next one, and the caches.

        Without drops, the result of a sequence does not depend on the other sequences.
        """
        x = embed(self.embed.embedding[...], tokens, self.embed.dtype)
        pairs = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.append(x, place, cache, comm)
            pairs.append(cache)
        return self.head(self.norm(x)).astype(jnp.float32), pairs
