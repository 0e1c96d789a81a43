"""A second implementation of the model of models/moe, for one device: no slots, every expert on every token.

Tests compare the distributed model with this one. It shares the names of parameters with models/moe, but no code.
"""

import jax
import jax.numpy as jnp
import numpy as np

TOP_K = 2


def normalise(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def turn(x):
    """Rotary positions of (b, s, heads, d), as complex numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle).astype(np.complex64)[None, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def attention(params, x, heads, window):
    batch, seq, width = x.shape
    q, k, v = (y.reshape(batch, seq, heads, -1) for y in jnp.split(x @ params["qkv"]["kernel"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", turn(q), turn(k)) / np.sqrt(width // heads)
    seen = np.tri(seq, dtype=bool) & ~np.tri(seq, k=-window, dtype=bool)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ params["out"]["kernel"]


def kept(expert, slots):
    """(t, TOP_K) choices -> whether each gets a slot. First choices come before second choices."""
    order = expert.T.reshape(-1)
    earlier = np.tri(len(order), k=-1, dtype=np.int32) * (order[:, None] == order)
    return (earlier.sum(1) < slots).reshape(TOP_K, -1).T


def experts(params, x, factor):
    """(t, d) of one rank -> (t, d), balancing loss, share of dropped choices."""
    probs = jax.nn.softmax(x @ params["router"])
    num_tokens, count = probs.shape
    weight, expert = jax.lax.top_k(probs, TOP_K)
    stays = kept(expert, num_tokens if factor is None else np.ceil(factor * TOP_K * num_tokens / count))
    share = weight / weight.sum(1, keepdims=True) * stays
    every = jnp.einsum("tef,efd->ted", jax.nn.relu(jnp.einsum("td,edf->tef", x, params["up"])) ** 2, params["down"])
    y = (jnp.take_along_axis(every, expert[:, :, None], 1) * share[:, :, None]).sum(1)
    first = (expert[:, :1] == np.arange(count)).mean(0)
    return y, count * (first * probs.mean(0)).sum(), 1 - stays.mean()


def scores(params, tokens, config, factor, window=None):
    """(b, s) of one rank -> (b, s, 256), balancing loss, share of dropped choices.

    A position attends to the last ``window`` ones; None means all.
    """
    x = params["embed"]["embedding"][tokens]
    balance, dropped = [], []
    for block in params["blocks"].values():
        normal = normalise(x, block["attention_norm"]["scale"])
        x = x + attention(block["attention"], normal, config.heads, window or tokens.shape[1])
        flat = normalise(x, block["moe_norm"]["scale"]).reshape(-1, config.width)
        y, layer_balance, layer_dropped = experts(block["moe"], flat, factor)
        x = x + y.reshape(x.shape)
        balance.append(layer_balance)
        dropped.append(layer_dropped)
    logits = normalise(x, params["norm"]["scale"]) @ params["head"]["kernel"]
    return logits, jnp.stack(balance).mean(), jnp.stack(dropped).mean()


def metrics(params, tokens, config, factor):
    """(batch, seq + 1) -> loss in nats per byte, balancing loss, share of dropped choices.

    Each rank has its own slots at the experts, so the tokens of each rank are routed separately. With factor None, no
    choice is dropped.
    """

    def of_rank(tokens):
        logits, balance, dropped = scores(params, tokens[:, :-1], config, factor)
        nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return nll.mean(), balance, dropped

    each = jax.lax.map(of_rank, tokens.reshape(config.ranks(), -1, tokens.shape[1]))
    return dict(zip(("loss", "balance", "dropped"), (x.mean() for x in each), strict=True))


def grads(params, tokens, config):
    """Metrics, and the gradient of the training loss."""

    def objective(params):
        found = metrics(params, tokens, config, None if config.moe == "dropless" else config.capacity)
        return found["loss"] + config.balance * found["balance"], found

    derivative, found = jax.grad(objective, has_aux=True)(params)
    return found, derivative


def rate(config, step):
    """Learning rate of a step; steps count from 0."""
    done = step + 1
    if done <= config.warmup:
        return config.lr * done / config.warmup
    share = min(1, (done - config.warmup) / (config.decay_steps - config.warmup))
    return config.lr * (0.05 + 0.95 * (1 + np.cos(np.pi * share)) / 2)


class AdamW:
    """AdamW on arrays in float64 (Loshchilov and Hutter, arXiv 1711.05101). Only matrices have weight decay."""

    def __init__(self, config, params):
        self.config, self.step = config, 0
        self.params = [np.asarray(x, np.float64) for x in params]
        self.mean = [np.zeros_like(x) for x in self.params]
        self.square = [np.zeros_like(x) for x in self.params]

    def update(self, gradients):
        self.step += 1
        for i, (p, g) in enumerate(zip(self.params, gradients, strict=True)):
            g = np.asarray(g, np.float64)
            self.mean[i] = 0.9 * self.mean[i] + 0.1 * g
            self.square[i] = 0.95 * self.square[i] + 0.05 * g * g
            step = self.mean[i] / (1 - 0.9**self.step) / (np.sqrt(self.square[i] / (1 - 0.95**self.step)) + 1e-8)
            decay = self.config.weight_decay * p * (p.ndim > 1)
            self.params[i] = p - rate(self.config, self.step - 1) * (step + decay)


def clip(gradients, limit):
    """Global norm, and the gradients scaled to a norm of at most ``limit``; float64."""
    gradients = [np.asarray(g, np.float64) for g in gradients]
    norm = np.sqrt(sum((g * g).sum() for g in gradients))
    return norm, [g * min(1, limit / norm) for g in gradients]
