"""A cluster and a mesh with round numbers, and step() on them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxcomm.simulate import Cluster, step

MESH = AbstractMesh((4, 8), ("data", "model"))
SIZES = {"data": 4, "model": 8}
H100 = Cluster.load("dgx-h100")
STEP = dataclasses.replace(
    H100, compute=dataclasses.replace(H100.compute, flops_per_s=1e15, efficiency=0.5, kernel_s=2e-6)
)
ADAPTER = 50e9 * 0.97
NVLINK = 450e9 * 0.78


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sharded(f, ins, outs=None, mesh=MESH):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=P() if outs is None else outs, check_vma=False))


def run(f, *args, ins, outs=None, **options):
    return step(sharded(f, ins, outs), args, mesh=MESH, cluster=STEP, **options)
