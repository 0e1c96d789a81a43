"""The steps of docs/guide/what-if.md. Each function gets a mesh and returns a step and its arguments."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm

LAYERS, WIDTH, HIDDEN, TOKENS = 32, 8192, 28672, 8 << 20


def zero3(mesh):
    """ZeRO-3 training of 32 feed-forward layers: gather the weights of a layer, and scatter the sum of its gradients.

    The axis "shard" divides the weights, axes before it replicate them. A batch has 8 Mi tokens in all.
    """
    replicas = tuple(axis for axis in mesh.axis_names if axis != "shard")

    def layer(x, weights):
        up, down = (lax.all_gather(w, "shard", tiled=True) for w in weights)
        return x + jax.nn.gelu(x @ up.reshape(WIDTH, HIDDEN)) @ down.reshape(HIDDEN, WIDTH)

    def loss(weights, x):
        for index in range(LAYERS):
            x = jax.checkpoint(layer)(x, [w[index] for w in weights])
        return jnp.sum(x.astype(jnp.float32))

    def step(weights, x):
        grads = jax.grad(loss)(weights, x)  # the transpose of all_gather sums and scatters
        return jax.tree.map(lambda w, g: w - 0.1 * (lax.psum(g, replicas) if replicas else g), weights, grads)

    spec = P(None, "shard")
    run = jax.shard_map(
        step, mesh=mesh, in_specs=((spec, spec), P(mesh.axis_names)), out_specs=(spec, spec), check_vma=False
    )
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH * HIDDEN), jnp.bfloat16)
    return run, ((weights, weights), jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16))


def experts(mesh):
    """One layer of experts, forward and backward: 8 of them for each token, over the axis "expert"."""
    tokens, width, hidden, choices = 4096, 7168, 2048, 8
    ranks = mesh.shape["expert"]
    rows = -(-tokens * choices // ranks) * ranks

    def layer(rows_out, up, down):
        received = jaxcomm.all_to_all(rows_out, "expert", 0, 0, tiled=True)
        return jaxcomm.all_to_all(jax.nn.silu(received @ up) @ down, "expert", 0, 0, tiled=True)

    def step(x, up, down):
        grads = jax.grad(lambda *w: jnp.sum(layer(*w).astype(jnp.float32)), argnums=(0, 1, 2))(x, up, down)
        return (grads[0], *(lax.psum(g, "data") for g in grads[1:]))

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P(), P(), P()), check_vma=False)
    shapes = ((rows, width), (width, hidden), (hidden, width))
    return run, tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
