"""Compares the kernel with plain JAX on all available GPUs.

python run.py build/libtoken_dispatch.so
python -m jaxcomm.run -n 4 run.py build/libtoken_dispatch.so    # in several processes
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from token_dispatch import reference, register, token_dispatch

from jaxcomm.distributed import initialize

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
