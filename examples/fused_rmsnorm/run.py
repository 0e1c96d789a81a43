"""Compares the kernel with plain JAX, on all GPUs of this process.

python run.py build/libfused_rmsnorm.so
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from fused_rmsnorm import fused_rmsnorm, reference, register
from jax.sharding import PartitionSpec as P

AXIS = "tensor"
CASES = [(1, 128), (33, 1000), (256, 4096), (5, 7)]
CALLS = 3  # of one program, one after the other: the second works on what the first has left in the window


def compare(mesh: jax.sharding.Mesh, tokens: int, hidden: int, dtype: jnp.dtype, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.uniform(-2, 2, (mesh.size * tokens, hidden)), dtype)
    residual = jnp.asarray(random.uniform(-2, 2, (tokens, hidden)), dtype)
    weight = jnp.asarray(random.uniform(0.5, 2, hidden), dtype)

    def program(step):
        def body(x, residual, weight):
            rows = []
            for _ in range(CALLS):
                out, residual = step(x, residual, weight, AXIS)
                rows.append(out)
            return jnp.stack(rows), residual

        specs = {"in_specs": (P(AXIS), P(), P()), "out_specs": (P(None, AXIS), P(AXIS))}
        return jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **specs))

    got, want = (jax.tree.map(np.asarray, program(step)(x, residual, weight)) for step in (fused_rmsnorm, reference))
    for ours, theirs in zip(got, want, strict=True):
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        by_rank = np.stack(np.split(ours, mesh.size, axis=-2))
        assert (by_rank == by_rank[0]).all(), "the ranks' results differ"
        tolerance = 1e-4 if dtype == jnp.float32 else 0.1
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def main() -> None:
    register(sys.argv[1])
    devices = jax.devices("cuda")
    mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    for seed, (tokens, hidden) in enumerate(CASES):
        for dtype in (jnp.float32, jnp.bfloat16):
            compare(mesh, tokens, hidden, dtype, seed)
            print(f"ok {jnp.dtype(dtype).name} {tokens} x {hidden} on {len(devices)} GPUs", flush=True)


if __name__ == "__main__":
    main()
