"""All devices of the program as one group, in one process or several, and the expected results.

Each process checks the rows of its own devices. JAX_PLATFORMS=cpu rehearses the tests without a GPU.
"""

import os

import jax
import numpy as np
import reference
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm._core import plan
from jaxcomm._request import NATIVE

if "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize()
SIZE = jax.device_count()
ON_GPU = jax.devices()[0].platform == "gpu"
MESH = Mesh(np.array(jax.devices()), ("i",), axis_types=(AxisType.Auto,))
SHARDING = NamedSharding(MESH, P("i"))
RING = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]

# op: (the call on a rank's block, (8 * SIZE, ...), with jaxcomm or jax.lax; NumPy's result from all blocks)
OPS = {
    "all_to_all": (
        lambda library, x, **k: library.all_to_all(x, "i", 0, 1, tiled=True, **k),
        lambda blocks: reference.all_to_all(blocks, 0, 1, tiled=True),
    ),
    "all_gather": (
        lambda library, x, **k: library.all_gather(x, "i", axis=1, tiled=True, **k),
        lambda blocks: reference.all_gather(blocks, 1, tiled=True),
    ),
    "psum": (lambda library, x, **k: library.psum(x, "i", **k), reference.psum),
    "pmean": (lambda library, x, **k: library.pmean(x, "i", **k), reference.pmean),
    "pmax": (lambda library, x, **k: library.pmax(x, "i", **k), reference.pmax),
    "pmin": (lambda library, x, **k: library.pmin(x, "i", **k), reference.pmin),
    "psum_scatter": (
        lambda library, x, **k: library.psum_scatter(x, "i", scatter_dimension=0, tiled=True, **k),
        lambda blocks: reference.psum_scatter(blocks, 0, tiled=True),
    ),
    "ppermute": (
        lambda library, x, **k: library.ppermute(x, "i", RING[:-1] or RING, **k),
        lambda blocks: reference.ppermute(blocks, RING[:-1] or RING),
    ),
    "pbroadcast": (
        lambda library, x, **k: library.pbroadcast(x, "i", SIZE - 1, **k),
        lambda blocks: reference.pbroadcast(blocks, SIZE - 1),
    ),
    "barrier": (lambda library, x, **k: library.barrier(x, "i", **k), reference.barrier),
}


def algorithms(op):
    """The algorithms that support the group. None, the table's choice, is included if it calls the handler."""
    nodes = 1 if ON_GPU else jax.process_count()
    request = plan.Request(NATIVE[op], nodes, SIZE // nodes, 8, source_of=range(SIZE), all_addressable=nodes == 1)
    names = [name for name in jaxcomm.algorithms(op) if plan.supports(request, name)]
    return ([None] if SIZE > 1 else []) + names


def put(rows):
    """A global array with one row per rank."""
    return jax.make_array_from_callback(rows.shape, SHARDING, lambda index: rows[index])


def on_ranks(body):
    """A function of arrays with one row per rank: body(row, ...) runs on every rank."""

    def block(*xs):
        return jax.tree.map(lambda y: y[None], body(*(x[0] for x in xs)))

    return jax.jit(jax.shard_map(block, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=False))


def assert_rows(got, want):
    """Compares exactly. `got`: arrays with one row per rank; `want`: the same in NumPy, for all ranks."""
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert list(got) == list(want)
    for path, array in got.items():
        for shard in array.addressable_shards:
            expected, name = want[path][shard.index], jax.tree_util.keystr(path)
            assert (shard.data.shape, shard.data.dtype) == (expected.shape, expected.dtype), name
            np.testing.assert_array_equal(np.asarray(shard.data), expected, err_msg=name)


def expected(op, rows):
    """NumPy's result, one row per rank."""
    return np.stack(OPS[op][1](list(rows)))


def numbers(seed, block, dtype):
    """Small integers, exact in every type and in every order of addition: one row per rank."""
    return np.random.default_rng(seed).integers(0, 4, (SIZE, *block)).astype(dtype)
