"""Decoder-only transformer over bytes, in Flax NNX, as it runs on one device.

The scripts use its modules as containers of parameters and repeat the forward pass with communication. Tests compare
them with the functions here.

Sizes in the docstrings: b sequences, s bytes each, d width, h heads, f hidden units.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCAB = 256  # bytes


def rotate(x, positions):
    """Rotary positions: rotates each pair of features of a head by an angle proportional to the position.

    Args:
      x: (b, s, h, d / h), d / h even.
      positions: (s,) place of each token in its sequence.

    Returns:
      The same shape and dtype.

    Source: Su et al., RoFormer, arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    precise = jnp.promote_types(x.dtype, jnp.float32)
    frequency = 10000.0 ** (-jnp.arange(half, dtype=precise) / half)
    angle = positions.astype(precise)[:, None, None] * frequency  # (s, 1, half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attend(query, key, value):
    """Causal attention over whole sequences, (b, s, h, d / h) each, with rotary positions."""
    precise = jnp.promote_types(query.dtype, jnp.float32)
    seq, size = query.shape[1], query.shape[3]
    positions = jnp.arange(seq)
    query, key = rotate(query, positions), rotate(key, positions)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key, preferred_element_type=precise) * size**-0.5
    # jax.nn.dot_product_attention computes a part of its derivative in float32, also for float64 (jax 0.10.2).
    shares = jax.nn.softmax(jnp.where(jnp.tri(seq, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqs,bshk->bqhk", shares.astype(value.dtype), value)


def matrix(rngs, *shape, inputs=1, scale=1.0):
    """A parameter whose first ``inputs`` dimensions are contracted."""
    dims = range(len(shape))
    init = nnx.initializers.variance_scaling(
        scale, "fan_in", "truncated_normal", in_axis=tuple(dims[:inputs]), out_axis=tuple(dims[inputs:])
    )
    return nnx.Param(init(rngs.params(), shape))


class Attention(nnx.Module):
    """Causal multi-head attention (Vaswani et al., arXiv 1706.03762)."""

    def __init__(self, config, rngs):
        size = config.width // config.heads
        make = functools.partial(matrix, rngs, config.width, config.heads, size)
        self.q, self.k, self.v = make(), make(), make()
        self.out = matrix(rngs, config.heads, size, config.width, inputs=2, scale=1 / (2 * config.layers))

    def project(self, x):
        """(b, s, d) -> query, key and value, (b, s, h, d / h) each."""
        return (jnp.einsum("bsd,dhk->bshk", x, w[...]) for w in (self.q, self.k, self.v))

    def __call__(self, x):
        """(b, s, d) -> (b, s, d)."""
        return jnp.einsum("bshk,hkd->bsd", attend(*self.project(x)), self.out[...])


class MLP(nnx.Module):
    """Gated feed-forward layer (SwiGLU, Shazeer, arXiv 2002.05202)."""

    def __init__(self, config, rngs):
        self.gate, self.up = (matrix(rngs, config.width, config.hidden) for _ in range(2))
        self.down = matrix(rngs, config.hidden, config.width, scale=1 / (2 * config.layers))

    def __call__(self, x):
        """(b, s, d) -> (b, s, d)."""
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    """Attention, then the feed-forward layer; each has a normalised input and a residual connection."""

    def __init__(self, config, rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x):
        """(b, s, d) -> (b, s, d)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nnx.Module):
    """Scores of the next byte."""

    def __init__(self, config, rngs):
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.scores = matrix(rngs, config.width, VOCAB)

    def __call__(self, x):
        """(b, s, d) -> (b, s, VOCAB)."""
        return self.norm(x) @ self.scores[...]


def embed(table, tokens, dtype):
    """(VOCAB, d) and (b, s) -> (b, s, d), cast after the lookup.

    The derivative adds the gradients of equal tokens in the type of the lookup. A sum of bfloat16 stops to grow after
    256 equal gradients, so this type is at least float32.
    """
    return table.astype(jnp.promote_types(dtype, jnp.float32))[tokens].astype(dtype)


class Transformer(nnx.Module):
    """Predicts the next byte."""

    block = Block  # type of the layers

    def __init__(self, config, rngs):
        self.embed = nnx.Param(nnx.initializers.normal(config.width**-0.5)(rngs.params(), (VOCAB, config.width)))
        self.blocks = nnx.List([self.block(config, rngs) for _ in range(config.layers)])
        self.head = Head(config, rngs)

    def __call__(self, tokens):
        """(b, s) int32 -> scores of the byte that follows each position, (b, s, VOCAB)."""
        x = embed(self.embed[...], tokens, self.head.scores.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits, targets):
    """Loss of each position, nats, at least in float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def loss(model, tokens):
    """Mean loss of (b, s + 1) tokens, nats per byte."""
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def structure(config, module=Transformer):
    """(graphdef, shapes of the parameters, init), without computing them; init() gives the parameters as a dict."""

    def split():
        return nnx.split(module(config, nnx.Rngs(config.seed)), nnx.Param)

    graphdef, state = nnx.eval_shape(split)
    return graphdef, nnx.to_pure_dict(state), lambda: nnx.to_pure_dict(split()[1])


def cast(params, config):
    return jax.tree.map(lambda x: x.astype(config.dtype), params)


def at_least_float32(params, config):
    """Parameters in the type in which gradients are added: float64 with --dtype float64, else float32."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(config.dtype, jnp.float32)), params)


def cast_model(params, config):
    """All parameters of a model, for its forward pass. The embedding is at least float32, see embed()."""
    return {**cast(params, config), "embed": at_least_float32(params["embed"], config)}
