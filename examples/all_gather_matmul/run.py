"""Compares the kernel with plain JAX on all available GPUs.

python run.py build/liball_gather_matmul.so
python -m jaxcomm.run -n 4 run.py build/liball_gather_matmul.so    # in several processes
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from all_gather_matmul import all_gather_matmul, reference, register
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.distributed import initialize

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
