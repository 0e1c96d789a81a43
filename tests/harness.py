"""Runs a function of one rank's block on every rank of a mesh, with jaxcomm and with jax.lax.

It works in several processes too: tests/multiprocess/test_ops.py runs the same tests in all of them.
"""

import itertools
import os
import pathlib
import pickle
import types

import jax
import numpy as np
from jax import lax
from jax._src import distributed
from jax.sharding import PartitionSpec as P

import jaxcomm


def _axes(axis_name):
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _varying(x, axis_name):
    """Types x as varying, if types track varying axes."""
    missing = tuple(
        a for a in _axes(axis_name)
        if jax.typeof(lax.axis_index(a)).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    )  # fmt: skip
    return lax.pcast(x, missing, to="varying") if missing else x


def _pbroadcast(x, axis_name, source):
    """pbroadcast as documented in jax.lax; XLA:CPU has no lowering for jax.lax.pbroadcast itself."""

    def one(leaf):
        masked = jax.numpy.where(lax.axis_index(_axes(axis_name)) == source, leaf, jax.numpy.zeros_like(leaf))
        return _varying(lax.psum(masked, axis_name), axis_name)

    return jax.tree.map(one, x)


def _barrier(x, axis_name, *, axis_index_groups=None):
    return jax.tree.map(lambda leaf: _varying(leaf, axis_name), x)


_shared = itertools.count()
OURS = jaxcomm
LAX = types.SimpleNamespace(
    **{op: getattr(lax, op) for op in ("all_to_all", "all_gather", "psum", "pmean", "pmax", "pmin")},
    psum_scatter=lax.psum_scatter,
    ppermute=lax.ppermute,
    pbroadcast=_pbroadcast,
    barrier=_barrier,
)


def on_ranks(body, mesh, **options):
    """Returns a function that runs body(row, ...) on every rank. Its pytrees have one row per rank, in mesh order."""
    spec = P(mesh.axis_names)

    def block(*xs):
        ys = body(*jax.tree.map(lambda x: lax.squeeze(x, (0,)), xs))
        return jax.tree.map(lambda y: lax.expand_dims(y, (0,)), ys)

    return jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def share(thing):
    """Returns the arguments of all processes in a list. All processes must call it."""
    if jax.process_count() == 1:
        return [thing]
    number, folder = next(_shared), pathlib.Path(os.environ["JAXCOMM_TEST_FOLDER"])
    (folder / f"{number}.{jax.process_index()}").write_bytes(pickle.dumps(thing))
    distributed.global_state.client.wait_at_barrier(f"share {number}", 60_000)
    (folder / f"{number - 1}.{jax.process_index()}").unlink(
        missing_ok=True
    )  # all processes are here, so all have read the file
    return [pickle.loads((folder / f"{number}.{p}").read_bytes()) for p in range(jax.process_count())]


def value(tree):
    """The elements of arrays, including those on devices of other processes."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    leaves, structure = jax.tree.flatten(tree)
    results = [np.empty(x.shape, x.dtype) for x in leaves]
    for shards_of_leaves in share([[(s.index, np.asarray(s.data)) for s in x.addressable_shards] for x in leaves]):
        for result, shards in zip(results, shards_of_leaves, strict=True):
            for index, data in shards:
                result[index] = data
    return jax.tree.unflatten(structure, results)


def run(body, mesh, *xs, **options):
    return value(jax.jit(on_ranks(body, mesh, **options))(*xs))


def assert_same(got, want, *, rtol=None, bits=False):
    """Compares structure, shapes, element types and values: exactly, to a relative tolerance, or bit by bit."""
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert list(got) == list(want)
    for path, a in got.items():
        a, b, name = np.asarray(a), np.asarray(want[path]), jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if bits:
            a, b = (np.frombuffer(z.tobytes(), np.uint8) for z in (a, b))
        if rtol is None:
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=name)


def compare(program, mesh, *xs, rtol=None, **options):
    """Runs program(library, row, ...) on every rank with both libraries, in one program. Returns jaxcomm's result."""
    got, want = run(lambda *blocks: [program(library, *blocks) for library in (OURS, LAX)], mesh, *xs, **options)
    assert_same(got, want, rtol=rtol)
    return got
