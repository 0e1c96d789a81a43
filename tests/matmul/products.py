"""Meshes, operands and reference programs for the tests of collective matmul."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from harness import on_ranks
from jax import lax
from jax.sharding import AxisType

import jaxcomm


def line_of(n):
    return jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def gathers(**options):
    return functools.partial(jaxcomm.all_gather_matmul, axis_name="i", **options)


def scatters(**options):
    return functools.partial(jaxcomm.matmul_psum_scatter, axis_name="i", **options)


def lax_gathers(x, w, axis=0):
    """The same computation with jax.lax, for any number of weights."""
    gathered = lax.all_gather(x, "i", axis=axis, tiled=True)
    return tuple(gathered @ one for one in w) if isinstance(w, tuple) else gathered @ w


def lax_scatters(x, w, scatter_dimension=0):
    return lax.psum_scatter(x @ w, "i", scatter_dimension=scatter_dimension, tiled=True)


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def collectives(f, mesh, *xs):
    """The number of each collective in the program; names of XLA's own have the prefix "xla "."""
    text = jax.jit(on_ranks(f, mesh)).lower(*xs).as_text()
    names = re.findall(r"custom_call @jaxcomm_(\w+)\(", text)
    of_xla = r"stablehlo\.(all_gather|all_reduce|reduce_scatter|collective_permute|all_to_all)\b"
    names += [f"xla {name}" for name in re.findall(of_xla, text)]
    return {name: names.count(name) for name in set(names)}


def transfers(f, mesh, *xs):
    """(source of each rank, shape of the block) of each ppermute in the program."""
    text = jax.jit(on_ranks(f, mesh)).lower(*xs).as_text()
    calls = re.findall(r"@jaxcomm_permute\(.*source_of = dense<\[(.*?)\]>.*-> tensor<(.*?)xf32>", text)
    return [(tuple(map(int, sources.split(", "))), tuple(map(int, shape.split("x")))) for sources, shape in calls]


def square_loss(f):
    """Scalar loss of each rank, whose cotangent depends on the result."""

    def loss(*operands):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*operands)))

    return loss
