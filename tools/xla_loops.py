"""A program of jax.lax alone that XLA:CPU aborts: docs/internals/cpu.md, XLA's own collectives beside jaxcomm's."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def exchange(y):
    return lax.all_to_all(y, "i", 0, 0, tiled=True)


def step(_, carry):
    return (exchange(carry[0]), *[0.5 * jnp.cumsum(y, axis=0) for y in carry[1:]])


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
def program(x):
    first = lax.fori_loop(0, 20, step, (x, x, 2 * x, 3 * x))
    second = lax.fori_loop(0, 21, step, (x + 1, 2 * x, 3 * x, 4 * x))
    return first, second, [exchange(jnp.sin(first[1 + k % 3] * (k + 1))) for k in range(10)]


for _ in range(200):
    jax.block_until_ready(program(jnp.ones((64, 64))))
