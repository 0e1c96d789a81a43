"""Small configurations of the scripts of parallel training, their programs, and training on one device."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain
from flax import nnx
from jax.sharding import NamedSharding

from models.cp import parallel as cp
from models.lm import comm as comm_lib
from models.lm import model as lm
from models.lm import step as step_lib
from models.lm import train as train_lib
from models.mesh import parallel as mesh
from models.moe import model as moe
from models.pp import parallel as pp
from models.tp import parallel as tp
from models.zero import parallel as zero

SIZES = {
    "layers": 2, "width": 16, "heads": 4, "hidden": 24, "batch": 8, "seq": 16, "lr": 1e-2, "warmup": 2,
    "decay_steps": 30, "weight_decay": 0.5,
}  # fmt: skip
SCRIPTS = {"cp": cp, "mesh": mesh, "pp": pp, "tp": tp, "zero": zero}


def tiny(script, **options):
    return SCRIPTS[script].Config(**{**SIZES, **options})


@functools.cache
def program(config):
    return SCRIPTS[config.name].build(config, train_lib.make_mesh(config), comm_lib.load(config))


def tokens(config, seed=0):
    return np.random.default_rng(seed).integers(0, lm.VOCAB, (config.batch, config.seq + 1)).astype(np.int32)


def first_state(config):
    """The state of a run before its first step."""
    found, mesh = program(config), train_lib.make_mesh(config)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), found.specs)
    return jax.device_put(jax.jit(found.init)(), shardings)  # this init is the same program for many configurations


def train(config, steps):
    """(losses, norms of the gradients, parameters) of a short run on other tokens in each step."""
    state, metrics = first_state(config), []
    for step in range(steps):
        state, found = program(config).step(state, tokens(config, step))
        metrics.append(found)
    values = (np.array([m[name] for m in metrics]) for name in ("loss", "grad_norm"))
    return *values, jax.device_get(state[0])


def structure(config):
    """Of the model on one device, see models.lm.model.structure."""
    script = SCRIPTS.get(config.name, moe)
    return lm.structure(config, getattr(script, "Transformer", lm.Transformer))


def losses_of_one_device(config, model, tokens):
    """(loss, the sum of losses that is minimised). Every expert computes every token, by plain.py."""
    if not getattr(config, "experts", 0):
        return (lm.loss(model, tokens),) * 2
    # The balancing loss is that of the tokens of a rank in a microbatch.
    microbatches, width = config.ranks("data") * config.microbatches, config.width
    positions = cp.positions_of(config.order, config.seq, config.ranks("context"))
    places = positions.reshape(config.ranks("context", "tensor"), -1)
    x, balance = model.embed[...][tokens[:, :-1]], 0.0
    for block in model.blocks:
        x = x + block.attention(block.attention_norm(x))
        normal = block.mlp_norm(x)
        params = {name: getattr(block.mlp, name)[...] for name in ("router", "up", "down")}
        x = x + plain.experts(params, normal.reshape(-1, width), None)[0].reshape(x.shape)
        groups = normal.reshape(microbatches, -1, config.seq, width)[:, :, places].swapaxes(1, 2)
        groups = groups.reshape(microbatches * len(places), -1, width)
        balance += jax.vmap(lambda x, params=params: plain.experts(params, x, None)[1])(groups).mean()
    loss = lm.cross_entropy(model.head(x), tokens[:, 1:]).mean()
    return loss, loss + config.balance * balance / config.layers


@functools.cache
def _one_device(config, steps):
    graphdef, _, init = structure(config)
    optimizer = optax.chain(optax.clip_by_global_norm(config.clip), step_lib.make_optimizer(config))

    def norm(grads):
        return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(grads)))

    @jax.jit
    def step(state, tokens):
        params, opt_state = state

        def losses(params):
            return losses_of_one_device(config, nnx.merge(graphdef, params), tokens)[::-1]

        (_, value), grads = jax.value_and_grad(losses, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, norm(grads))

    params = jax.jit(init)()
    state, metrics = (params, optimizer.init(params)), []
    for number in range(steps):
        state, found = step(state, tokens(config, number))
        metrics.append(found)
    return np.array(metrics).T


def train_one_device(steps, config):
    """(losses, norms of the gradients) of the same model without any collective, by optax alone."""
    if not getattr(config, "experts", 0):  # the same for all scripts and layouts
        given = {name: getattr(config, name) for name in (*SIZES, "clip")}
        config = tp.Config(**given, layout="1x1")
    return _one_device(config, steps)


def gradients_of_one_device(config):
    """(parameters, loss, gradients) in float64, on the whole batch."""
    graphdef, _, init = structure(config)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), jax.jit(init)())

    def losses(params):
        return losses_of_one_device(config, nnx.merge(graphdef, params), tokens(config))[::-1]

    (_, value), grads = jax.jit(jax.value_and_grad(losses, has_aux=True))(params)
    return params, value, grads


def collectives(f, *arguments):
    """The number of each collective in a program; names of XLA's own have the prefix "xla "."""
    text = f.lower(*arguments).as_text()
    names = collections.Counter(re.findall(r"custom_call @jaxcomm_(\w+)\(", text))
    ends = names.pop("done", 0)
    assert ends <= names.total(), "a transfer was ended that has no custom call, as in a group of one rank"
    of_xla = r"stablehlo\.(all_gather|all_reduce|reduce_scatter|collective_permute|all_to_all)\b"
    return dict(names + collections.Counter(f"xla {name}" for name in re.findall(of_xla, text)))
