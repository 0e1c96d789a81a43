"""The kernel as a function of JAX, to be called inside jit(shard_map) on GPUs.

The program compares the kernel with plain JAX on all available GPUs:

    python token_dispatch.py build/libtoken_dispatch.so
    python -m jaxcomm.run -n 4 token_dispatch.py build/libtoken_dispatch.so    # in several processes
"""

import ctypes
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.distributed import initialize


@functools.cache
def register(library: str | os.PathLike) -> None:
    """Loads the library that CMake has built and registers its handlers. Call it once, before the first use."""
    loaded = ctypes.CDLL(os.fspath(library))
    jaxcomm.register_ffi_target(
        "token_dispatch", loaded, initialize="TokenDispatchInitialize", execute="TokenDispatchExecute"
    )


def token_dispatch(x: jax.Array, to: jax.Array, axis_name):
    """Sends each row to a rank.

    Args:
      x: (tokens, width), this rank's rows, of any type.
      to: (tokens,), integers: the rank of each row, from 0 to ranks - 1.
      axis_name: mesh axis, or tuple of axes: the ranks.

    Returns:
      (ranks, tokens, width): rows from each rank, in the order of that rank, then zeros; and (ranks,), their numbers.
    """
    results = jax.eval_shape(lambda x, to: reference(x, to, axis_name), x, to)  # also the axes over which they vary
    order = jnp.argsort(to, stable=True).astype(jnp.int32)
    ranks = jnp.arange(lax.axis_size(axis_name))
    begin = jnp.sum(to[None] < ranks[:, None], axis=1, dtype=jnp.int32)
    return jaxcomm.ffi_call("token_dispatch", results, axis_name)(x, order, begin)


def reference(x: jax.Array, to: jax.Array, axis_name):
    """The same function in plain JAX."""
    ranks = jnp.arange(lax.axis_size(axis_name))
    mine = to[None] == ranks[:, None]  # [rank, token]
    place = jnp.where(mine, jnp.cumsum(mine, axis=1) - 1, x.shape[0])
    out = jnp.zeros((ranks.size, *x.shape), x.dtype).at[ranks[:, None], place].set(x[None], mode="drop")
    counts = jnp.sum(mine, axis=1, dtype=jnp.int32)
    return (
        lax.all_to_all(out, axis_name, 0, 0, tiled=True),
        lax.all_to_all(counts, axis_name, 0, 0, tiled=True),
    )


# The comparison.

AXIS = "expert"
CASES = [(1, 16), (100, 33), (4096, 1024)]  # tokens, width
CALLS = 3  # per program, in sequence, on the same window


def differences(mesh: jax.sharding.Mesh, tokens: int, width: int, dtype: jnp.dtype) -> int:
    random = np.random.default_rng(tokens)

    def place(values):
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, P(AXIS)), lambda index: values[index])

    x = place(random.integers(-100, 100, (mesh.size * tokens, width)).astype(dtype))
    to = place(random.integers(0, mesh.size, mesh.size * tokens).astype(np.int32))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P(), check_vma=False)
    def program(x, to):
        found = jnp.int32(0)
        for _ in range(CALLS):
            for ours, theirs in zip(token_dispatch(x, to, AXIS), reference(x, to, AXIS), strict=True):
                found += jnp.sum(ours != theirs)
            x, to = -x, (to + 1) % mesh.size
        return lax.psum(found, AXIS)

    return int(program(x, to))


def main() -> None:
    initialize()  # when started by jaxcomm.run
    register(sys.argv[1])
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for tokens, width in CASES:
        for dtype in (jnp.bfloat16, jnp.int8):
            found = differences(mesh, tokens, width, dtype)
            print(f"{jnp.dtype(dtype).name} {tokens} x {width} on {mesh.size} GPUs: {found} differences")
            if found:
                sys.exit("the kernel and JAX differ")


if __name__ == "__main__":
    main()
