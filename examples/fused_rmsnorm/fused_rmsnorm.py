"""The kernel as a function of JAX, to be called inside jit(shard_map) on GPUs.

The program compares the kernel with plain JAX on all available GPUs:

    python fused_rmsnorm.py build/libfused_rmsnorm.so
    python -m jaxcomm.run -n 4 fused_rmsnorm.py build/libfused_rmsnorm.so    # in several processes
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
            f"fused_rmsnorm_{suffix}",
            loaded,
            initialize=f"FusedRmsnormInitialize{suffix}",
            execute=f"FusedRmsnormExecute{suffix}",
        )


def fused_rmsnorm(x: jax.Array, residual: jax.Array, weight: jax.Array, axis_name, epsilon: float = 1e-6):
    """Adds x of all ranks to the residual and normalises the rows of the result.

    Args:
      x: (tokens, hidden), this rank's part of the sum; float32 or bfloat16.
      residual: (tokens, hidden), the same on all ranks.
      weight: (hidden,), the same on all ranks.
      axis_name: mesh axis, or tuple of axes: the ranks.
      epsilon: is added to the mean of the squares.

    Returns:
      The normalised rows and the new residual, both of x's shape and the same on all ranks.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2
    call = jaxcomm.ffi_call(f"fused_rmsnorm_{_TYPES[str(x.dtype)]}", results, axis_name, operand_windows=[0])
    return call(x, residual, weight, epsilon=np.float32(epsilon))


def reference(x: jax.Array, residual: jax.Array, weight: jax.Array, axis_name, epsilon: float = 1e-6):
    """The same function in plain JAX."""
    total = residual.astype(jnp.float32) + lax.psum(x.astype(jnp.float32), axis_name)
    new_residual = total.astype(x.dtype)
    rows = new_residual.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(rows * rows, axis=1, keepdims=True) + epsilon)
    return (rows * scale * weight.astype(jnp.float32)).astype(x.dtype), new_residual


# The comparison.

AXIS = "tensor"
CASES = [(1, 128), (33, 1000), (256, 4096), (5, 7)]
CALLS = 3  # per program, in sequence; the second uses the arena that the first has used
TOLERANCE = {jnp.float32: 1e-4, jnp.bfloat16: 0.05}


def worst_error(ours: jax.Array, theirs: jax.Array, tolerance: float) -> jax.Array:
    """The largest difference in units of the tolerance; infinite if ranks differ or a result is NaN."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    error = jnp.max(jnp.abs(ours - theirs) / (tolerance * (1 + jnp.abs(theirs))))
    same = jnp.all(lax.pmax(ours, AXIS) == lax.pmin(ours, AXIS))
    return lax.pmax(jnp.where(same, error, jnp.inf), AXIS)


def compare(mesh: jax.sharding.Mesh, tokens: int, hidden: int, dtype: jnp.dtype) -> float:
    random = np.random.default_rng(tokens)

    def draw(spec, low, high, *shape):
        values = random.uniform(low, high, shape).astype(dtype)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: values[index])

    x = draw(P(AXIS), -2, 2, mesh.size * tokens, hidden)
    residual, weight = draw(P(), -2, 2, tokens, hidden), draw(P(), 0.5, 2, hidden)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(AXIS), P(), P()), out_specs=P(), check_vma=False)
    def program(x, residual, weight):
        errors = []
        for _ in range(CALLS):
            results = fused_rmsnorm(x, residual, weight, AXIS)
            expected = reference(x, residual, weight, AXIS)
            errors += [worst_error(*pair, TOLERANCE[dtype]) for pair in zip(results, expected, strict=True)]
            x, residual = results
        return jnp.max(jnp.stack(errors))

    return float(program(x, residual, weight))


def main() -> None:
    initialize()  # when started by jaxcomm.run
    register(sys.argv[1])
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for tokens, hidden in CASES:
        for dtype in TOLERANCE:
            error = compare(mesh, tokens, hidden, dtype)
            print(f"{jnp.dtype(dtype).name} {tokens} x {hidden} on {mesh.size} GPUs: {error:.3f} of the tolerance")
            if not error <= 1:
                sys.exit("the kernel and JAX differ")


if __name__ == "__main__":
    main()
