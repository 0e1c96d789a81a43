"""Base of the tests of an op: meshes, blocks, element types, calls and oracles."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import AxisType, Mesh

import jaxcomm
from jaxcomm import _lowering
from jaxcomm._core import plan
from jaxcomm._processes import placement
from jaxcomm._request import NATIVE

NUM_NODES = int(os.environ.get("JAXCOMM_TEST_NODES", "1"))  # see tests/multiprocess/test_ops.py
MESH = {"node": 2, "gpu": 4}  # axes of the fixture `mesh`
BLOCK = (48, 8)  # divides into 1, 2, 3, 4, 6, 8 and 16 parts, and the second dimension into up to 8
# Orders of the ranks of groups that are not their own inverse, from four ranks on.
ORDERS = {2: [1, 0], 4: [3, 0, 2, 1], 8: [5, 0, 3, 6, 1, 7, 2, 4]}
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
INTEGERS = (
    "int2", "uint2", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
SMALL_FLOATS = (
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16",
)  # fmt: skip
ALL_DTYPES = ("bool", *INTEGERS, *SMALL_FLOATS, "float32", "float64", "complex64", "complex128")
COMMON = (  # one type of each kind: one bit, half a byte, each size and class
    "bool", "int4", "int8", "uint16", "int32", "int64", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64",
    "complex64",
)  # fmt: skip


def make_mesh(sizes, devices=None):
    devices = np.array(jax.devices() if devices is None else devices)[: math.prod(sizes.values())]
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def fitting(op, sizes, axes):
    """The algorithms that support a group over these axes of a mesh {axis: size} of the first devices."""
    rows = _lowering.replica_groups(tuple(sizes), tuple(sizes.values()), axes, None)
    per_node = {placement.ranks_per_node(row // (8 // NUM_NODES)) for row in rows}
    one_node = per_node == {rows.shape[1]}
    if one_node:
        per_node = {_lowering.ranks_per_node(tuple(sizes[a] for a in axes), None)}
    per_node = per_node.pop() if len(per_node) == 1 else 1
    nodes, source_of = rows.shape[1] // per_node, range(rows.shape[1])
    request = plan.Request(NATIVE[op], nodes, per_node, 8, source_of=source_of, all_addressable=one_node)
    return [name for name in jaxcomm.algorithms(op) if plan.supports(request, name)]


def any_bits(rng, shape, name):
    """Random elements: all values of integers, all bit patterns of floats, including NaN payloads."""
    dtype = jnp.dtype(name)
    if name == "bool" or name in INTEGERS:
        bits = 1 if name == "bool" else int(name.lstrip("uint"))
        values = rng.integers(0, min(2**bits, 256), (*shape, max(bits // 8, 1)), np.uint8)
        return values[..., 0].astype(dtype) if bits < 8 else values.view(dtype)[..., 0]
    if name == "float4_e2m1fn":  # four bits in a byte
        return rng.integers(0, 16, shape, np.uint8).view(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


class Collective:
    """Subclasses define the name of the op, its arguments, and the features that jax.lax lacks."""

    op: str
    dtypes: tuple = ALL_DTYPES
    exact = True  # integers stay integers
    rounds = False  # sums floats; between nodes, the order depends on the plan

    @staticmethod
    def arguments(n):
        """Arguments of the standard call in a group of n ranks, on a block of shape BLOCK."""
        return {}

    sample: tuple = ()  # tests of the default size, if the op runs the code of another op

    def call(self, library, x, axes, groups=None, **more):
        n = lax.axis_size(axes) if groups is None else len(groups[0])
        if groups is not None:
            more["axis_index_groups"] = groups
        return getattr(library, self.op)(x, axes, **{**self.arguments(n), **more})

    def oracle(self, x, sizes, axes, groups=None, **changed):
        """The expected results on a mesh {axis: size}; operands and results have one row per rank."""
        axes = axes if isinstance(axes, tuple) else (axes,)
        n = math.prod(sizes[a] for a in axes) if groups is None else len(groups[0])
        rows = x.reshape(*sizes.values(), *x.shape[1:])
        arguments = {**self.arguments(n), **changed}
        y = reference.on_mesh(getattr(reference, self.op), rows, sizes, axes, groups, **arguments)
        return y.reshape(len(x), *y.shape[len(sizes) :])

    def integers(self, rng, rows=8, block=BLOCK):
        """Values whose sums are exact."""
        return rng.integers(-64, 64, (rows, *block)).astype(np.float32)
