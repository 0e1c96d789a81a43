"""Compares the kernel with plain JAX, on all GPUs that there are.

python run.py build/libfused_rmsnorm.so
python -m jaxcomm.run -n 4 run.py build/libfused_rmsnorm.so    # in several processes
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from fused_rmsnorm import fused_rmsnorm, reference, register
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.distributed import initialize

AXIS = "tensor"
CASES = [(1, 128), (33, 1000), (256, 4096), (5, 7)]
CALLS = 3  # of one program, one after the other: the second works on what the first has left in the arena
TOLERANCE = {jnp.float32: 1e-4, jnp.bfloat16: 0.05}


def worst_error(ours: jax.Array, theirs: jax.Array, tolerance: float) -> jax.Array:
    """1 where results differ as much as is tolerated; infinite where ranks differ, or for what is no number."""
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
    initialize()  # under jaxcomm.run
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
