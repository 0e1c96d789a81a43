"""reshard(): values of random arrays, what is not copied, options, and errors that move nothing."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resharding
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _reshard


def mesh(devices, **axes):
    return Mesh(np.array(jax.devices())[list(devices)].reshape(list(axes.values())), tuple(axes))


ROWS = NamedSharding(mesh(range(4), a=4), P("a"))
COLUMNS = NamedSharding(mesh([6, 7, 3, 2], a=2, b=2), P(None, ("b", "a")))


@pytest.fixture
def x():
    return jax.device_put(jnp.arange(64.0).reshape(8, 8), ROWS)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.full) for s in range(4, 40))])
def test_every_shard_has_the_right_elements(seed):
    resharding.check_random(seed, 12, max_bytes=[None, 1, 300][seed % 3], algorithm=[None, "direct", "xla"][seed % 3])


def test_large_arrays_in_chunks_of_all_strides():
    """Several threads work, and stores bypass the caches."""
    x = np.random.default_rng(0).standard_normal((4096, 1280), np.float32)
    rows = NamedSharding(mesh(range(8), a=4, b=2), P("a"))
    for target in (COLUMNS, NamedSharding(mesh([5, 1, 4], a=1, b=3), P("a"))):
        resharding.check(jaxcomm.reshard(resharding.place(x, rows), target), x, target)


def pointers(array):
    return {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


def test_shards_that_stay_keep_their_buffers(x):
    same = NamedSharding(mesh(range(4), b=4), P("b", None))
    replicated = jax.device_put(x, NamedSharding(mesh(range(4), a=4), P()))
    some = NamedSharding(mesh([2, 0], c=2), P())
    a, b, moved = jaxcomm.reshard((x, replicated, x), (same, some, COLUMNS))
    assert (a.sharding, b.sharding, moved.sharding) == (same, some, COLUMNS)
    assert pointers(a) == pointers(x)
    assert pointers(b).items() <= pointers(replicated).items() and len(pointers(b)) == 2


def test_trees_and_prefixes(x):
    tree = {"w": (x, x + 1), "b": [x[0]]}
    moved = jaxcomm.reshard(tree, {"w": COLUMNS, "b": NamedSharding(mesh([5], a=1), P())})
    assert jax.tree.structure(moved) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, moved, tree)
    assert moved["w"][1].sharding == COLUMNS


def test_donated_arrays_are_deleted_when_they_have_moved(x):
    stays, moves = x + 1, x + 2
    kept, moved = jaxcomm.reshard([stays, moves], [ROWS, COLUMNS], donate=True)
    assert moves.is_deleted() and not kept.is_deleted()
    np.testing.assert_array_equal(moved, x + 2)
    np.testing.assert_array_equal(kept, x + 1)


def test_a_program_is_compiled_once(x):
    jaxcomm.reshard(x, COLUMNS)
    before = _reshard._program.cache_info().misses
    jaxcomm.reshard(x + 1, COLUMNS)
    assert _reshard._program.cache_info().misses == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (lambda x: ({"a": x, "b": x}, {"a": ROWS}), ValueError, "shardings must have the structure of tree"),
        (lambda x: (x, P("a")), TypeError, "new sharding of x must be a jax.sharding.Sharding, got P"),
        (lambda x: ([x[:6]], ROWS), ValueError, r"new sharding of \[0\] does not fit shape \(6, 8\)"),
        (lambda x: (np.ones(8), ROWS), TypeError, "x must be a jax.Array, or a jax.ShapeDtypeStruct with a sharding"),
        (lambda x: (jax.ShapeDtypeStruct((8,), "int8"), ROWS), TypeError, "with a sharding, got ShapeDtypeStruct"),
        (lambda x: (jax.random.key(0), ROWS), TypeError, "pass its data"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, error, text, x):
    with pytest.raises(error, match=text):
        jaxcomm.reshard(*arguments(x))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "ring"}, "unknown algorithm 'ring'; pass one of direct, xla"),
        ({"max_bytes": 0}, "max_bytes must be positive"),
        ({"timeout_s": 0}, "timeout_s must be positive"),
    ],
)
def test_wrong_options_are_named(options, text, x):
    with pytest.raises(ValueError, match=text):
        jaxcomm.reshard(x, COLUMNS, **options)


def test_an_array_cannot_be_donated_twice(x):
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] are the same array"):
        jaxcomm.reshard({"a": x, "b": x}, COLUMNS, donate=True)
    assert not x.is_deleted()


def test_a_deleted_array_is_named(x):
    x.delete()
    with pytest.raises(ValueError, match=r"x has been deleted or donated"):
        jaxcomm.reshard(x, COLUMNS)


SETTING = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
import jaxcomm
from jaxcomm import _reshard
to = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
moved = jaxcomm.reshard(jax.numpy.arange(4), to)
assert moved.sharding == to and _reshard._program.cache_info().misses == 0
"""


def test_the_setting_selects_device_put(monkeypatch):
    monkeypatch.setenv("JAXCOMM_ALGORITHM", "xla")
    root = pathlib.Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", SETTING], check=True, cwd=root, timeout=120)
