"""The kernel as a function of JAX, to be called inside jit(shard_map) on GPUs.

The program compares the kernel with plain JAX on all available GPUs:

    python all_gather_matmul.py build/liball_gather_matmul.so
    python -m jaxcomm.run -n 4 all_gather_matmul.py build/liball_gather_matmul.so    # in several processes
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

_TYPES = {"float32": "F32", "bfloat16": "BF16"}


@functools.cache
def register(library: str | os.PathLike) -> None:
    """Loads the library that CMake has built and registers its handlers. Call it once, before the first use."""
    loaded = ctypes.CDLL(os.fspath(library))
    for suffix in _TYPES.values():
        jaxcomm.register_ffi_target(
            f"all_gather_matmul_{suffix}",
            loaded,
            initialize=f"AllGatherMatmulInitialize{suffix}",
            execute=f"AllGatherMatmulExecute{suffix}",
        )


def all_gather_matmul(x: jax.Array, w: jax.Array, axis_name):
    """Multiplies the rows of all ranks by this rank's matrix.

    Args:
      x: (tokens, hidden), this rank's rows; float32 or bfloat16.
      w: (hidden, columns), of x's type; each rank may have its own.
      axis_name: mesh axis, or tuple of axes: the ranks.

    Returns:
      (ranks * tokens, columns), of x's type. Sums are in float32.
    """
    if w.dtype != x.dtype:
        raise TypeError(f"all_gather_matmul: w has type {w.dtype}, expected that of x: {x.dtype}")
    result = jax.eval_shape(lambda x, w: reference(x, w, axis_name), x, w)  # also the axes over which it varies
    return jaxcomm.ffi_call(f"all_gather_matmul_{_TYPES[str(x.dtype)]}", result, axis_name)(x, w)


def reference(x: jax.Array, w: jax.Array, axis_name):
    """The same function in plain JAX."""
    rows = lax.all_gather(x, axis_name, tiled=True)
    return jnp.matmul(rows, w, preferred_element_type=jnp.float32, precision="highest").astype(x.dtype)


# The comparison.

AXIS = "tensor"
CASES = [(1, 64, 33), (16, 128, 256), (100, 1000, 64), (2048, 512, 512)]  # tokens, hidden, columns
CALLS = 3  # per program, in sequence, on the same slots
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 0.01}


def compare(mesh: jax.sharding.Mesh, tokens: int, hidden: int, columns: int, dtype: jnp.dtype) -> float:
    """The largest difference in units of the tolerance; infinite if a result is NaN."""
    random = np.random.default_rng(tokens)

    def draw(*shape):
        values = random.uniform(-1, 1, shape).astype(dtype)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, P(AXIS)), lambda index: values[index])

    x, w = draw(mesh.size * tokens, hidden), draw(mesh.size * hidden, columns)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P(), check_vma=False)
    def program(x, w):
        worst = jnp.float32(0)
        for _ in range(CALLS):
            ours, theirs = (f(x, w, AXIS).astype(jnp.float32) for f in (all_gather_matmul, reference))
            error = jnp.max(jnp.abs(ours - theirs)) / (TOLERANCE[dtype] * hidden**0.5)
            worst = jnp.maximum(worst, jnp.where(jnp.isnan(error), jnp.inf, error))
            x = -x
        return lax.pmax(worst, AXIS)

    return float(program(x, w))


def main() -> None:
    initialize()  # when started by jaxcomm.run
    register(sys.argv[1])
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for tokens, hidden, columns in CASES:
        for dtype in TOLERANCE:
            error = compare(mesh, tokens, hidden, columns, dtype)
            print(
                f"{jnp.dtype(dtype).name} {tokens} x {hidden} x {columns} on {mesh.size} GPUs: "
                f"{error:.3f} of the tolerance"
            )
            if not error <= 1:
                sys.exit("the kernel and JAX differ")


if __name__ == "__main__":
    main()
