"""reshard(): values of random arrays, what is not copied, options, and errors that move nothing."""

import functools
import io
import math
import operator
import random
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resharding
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _config, _lowering, _reshard
from jaxcomm._core import plan


def mesh(devices, **axes):
    return Mesh(np.array(jax.devices())[list(devices)].reshape(list(axes.values())), tuple(axes))


ROWS = NamedSharding(mesh(range(4), a=4), P("a"))
COLUMNS = NamedSharding(mesh([6, 7, 3, 2], a=2, b=2), P(None, ("b", "a")))
pinned = operator.methodcaller("with_memory_kind", "pinned_host")
_PRIMITIVE = _reshard.reshard_p


@pytest.fixture
def x():
    return jax.device_put(jnp.arange(64.0).reshape(8, 8), ROWS)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.full) for s in range(4, 40))])
def test_every_shard_has_the_right_elements(seed):
    resharding.check_random(seed, 12, max_bytes=[None, 1, 300][seed % 3], algorithm=[None, "direct", "xla"][seed % 3])


def test_large_arrays_in_chunks_and_pieces_of_two_inner_dimensions():
    """Several threads work, and stores bypass the caches."""
    x = np.random.default_rng(0).standard_normal((4096, 1280), np.float32)
    rows = NamedSharding(mesh(range(8), a=4, b=2), P("a"))
    for target in (COLUMNS, NamedSharding(mesh([5, 1, 4], a=1, b=3), P("a"))):
        resharding.check(jaxcomm.reshard(resharding.place(x, rows), target), x, target)
    x = np.arange(192, dtype=np.float32).reshape(4, 6, 8)
    whole, parts = NamedSharding(mesh([0], a=1), P()), NamedSharding(mesh([4, 1, 6, 3], a=2, b=2), P(None, "a", "b"))
    for source, target in ((whole, parts), (parts, whole)):
        resharding.check(jaxcomm.reshard(resharding.place(x, source), target), x, target)


@pytest.mark.parametrize("seed", range(4))
def test_devices_receive_what_their_new_shards_lack(seed):
    """Each element once, in random pairs of shardings, within one host and between hosts. NumPy marks the elements."""
    rng = random.Random(seed)
    moving = 0
    for shape in rng.choices(resharding.SHAPES, k=40):
        marks = np.arange(math.prod(shape)).reshape(shape)
        source, target = (resharding.random_sharding(rng, shape) for _ in range(2))
        old, new = (sharding.devices_indices_map(shape) for sharding in (source, target))
        lacks = {d: np.setdiff1d(marks[index], marks[old[d]] if d in old else []).size for d, index in new.items()}
        move = _reshard._Move.of("x", jax.ShapeDtypeStruct(shape, "float32", sharding=source), target)
        n = len(move.devices)
        for scope, of_host in (("node", n), ("network", n // 2 if n % 2 == 0 else 1)):
            request = plan.reshard_request(scope, n, of_host, *move.key[-2:])
            for algorithm in filter(lambda name: plan.supports(request, name), ("direct", "hierarchical")):
                received = dict.fromkeys(new, 0)
                for step in (step for p in plan.build(request, algorithm) for step in p.steps):
                    if step.kind in ("put", "get"):
                        received[move.devices[step.dst.rank]] += step.count
                assert received == lacks, (source, target, algorithm)
        moving += sum(lacks.values()) > 0
    assert moving > 15


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


@pytest.mark.parametrize("algorithm", ["direct", "xla"])
def test_donated_arrays_are_deleted_when_they_have_moved(x, algorithm):
    """An array of which some shards stay is not deleted by XLA's copies: the result has their buffers."""
    stays, moves, leaves = x + 1, x + 2, x + 3
    targets = [ROWS, COLUMNS, NamedSharding(mesh(range(4, 8), a=4), P("a"))]
    kept, moved, left = jaxcomm.reshard([stays, moves, leaves], targets, donate=True, algorithm=algorithm)
    assert moves.is_deleted() and leaves.is_deleted() and not kept.is_deleted()
    jax.device_put(again := x + 1, ROWS, donate=True)
    assert not stays.is_deleted() and not again.is_deleted()
    for found, number in ((kept, 1), (moved, 2), (left, 3)):
        np.testing.assert_array_equal(found, x + number)
    whole = jax.device_put(x, NamedSharding(mesh(range(4), a=4), P()))
    some = jaxcomm.reshard(whole, NamedSharding(mesh([2, 5], a=2), P()), donate=True, algorithm=algorithm)
    assert whole.is_deleted() == (algorithm == "direct")
    np.testing.assert_array_equal(some, x)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (lambda x: ({"a": x, "b": x}, {"a": ROWS}), ValueError, "shardings must have the structure of tree"),
        (lambda x: (x, P("a")), TypeError, "new sharding of x must be a jax.sharding.Sharding, or .* got P"),
        (lambda x: ([x[:6]], ROWS), ValueError, r"new sharding of \[0\] does not fit shape \(6, 8\)"),
        (lambda x: (x, NamedSharding(AbstractMesh((4,), ("a",)), P("a"))), ValueError, "new sharding of x .*Abstract"),
        (lambda x: (x, pinned(COLUMNS)), ValueError, "x can't move from or to memory 'pinned"),
        (lambda x: (x, pinned(ROWS)), ValueError, "x can't move from or to memory 'pinned"),
        (lambda x: (jax.device_put(x, pinned(ROWS)), COLUMNS), ValueError, "x can't move from or to memory 'pinned"),
        (lambda x: (jax.ShapeDtypeStruct((8, 8), "int8", sharding=ROWS), COLUMNS), ValueError, "x must be a jax.Array"),
        (lambda x: (np.ones(8), ROWS), TypeError, "x must be a jax.Array, or a jax.ShapeDtypeStruct with a sharding"),
        (lambda x: (jax.ShapeDtypeStruct((8,), "int8"), ROWS), TypeError, "with a sharding, got ShapeDtypeStruct"),
        (lambda x: (jax.random.key(0), ROWS), TypeError, "pass its data"),
        (lambda x: ([x], [typed(ROWS, "int8", (4, 16))]), ValueError, r"\[0\] has shape \(8, 8\), but .* \(4, 16\)"),
        (lambda x: (x, jax.ShapeDtypeStruct((8, 8), "int8")), TypeError, "new sharding of x must be .* got None"),
        (lambda x: (x + 1j, typed(ROWS, "int8")), TypeError, "x can't change from complex64 to int8"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, error, text, x):
    with pytest.raises(error, match=text):
        jaxcomm.reshard(*arguments(x), donate=True)
    np.testing.assert_array_equal(x, np.arange(64.0).reshape(8, 8))


def test_traced_arrays_and_devices_of_another_client_are_named(x, monkeypatch):
    with pytest.raises(TypeError, match=r"\['a'\] is traced; inside jit, use jaxcomm.reshard_in"):
        jax.jit(lambda x: jaxcomm.reshard({"a": x}, COLUMNS))(x)
    known = jax.devices()[:6]
    monkeypatch.setattr(jax, "devices", lambda platform: known)
    with pytest.raises(ValueError, match=r"x has devices that are not in jax.devices\(\): .*6.*7"):
        jaxcomm.reshard(x, COLUMNS)


def test_explain_counts_the_elements_that_a_rank_lacks():
    """By devices or by ranks, on CPUs and for GPUs that are not there: 7 of 8 columns of 2 rows come from others."""
    every = mesh(range(8), a=8)
    devices = NamedSharding(every, P("a")), NamedSharding(every, P(None, "a"))
    ranks = tuple(jaxcomm.RankSharding(np.arange(8), ("r",), P(*spec)) for spec in (("r",), (None, "r")))
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    for op, shardings, sizes in (("reshard", devices, None), ("reshard_in", ranks, 8), ("reshard_in_start", ranks, 8)):
        assert jaxcomm.algorithms(op) == ("direct", "hierarchical")
        for platform, algorithm, text in (("cpu", "direct", "lowest"), ("cuda", "xla", "jaxcomm has no kernels")):
            told = jaxcomm.explain(op, x, sizes, shardings=shardings, platform=platform)
            assert (told.algorithm, told.input_bytes, told.output_bytes) == (algorithm, 64, 64)
            assert (told.bytes["node"], told.messages["node"], told.bytes["self"]) == (14 * 4, 7, 2 * 4)
            assert text in told.reason and told.predicted_time_s > told.launch_s
    for where in ({"scope": "network"}, {"platform": "cuda"}):
        between = jaxcomm.explain("reshard_in", x, 8, shardings=ranks, ranks_per_node=4, **where)
        assert (between.bytes["node"], between.bytes["network"]) == (6 * 4, 8 * 4)
    with pytest.raises(ValueError, match="reshard: shardings must be the old and the new one, got None"):
        jaxcomm.explain("reshard", x)


@pytest.mark.parametrize("op", ["reshard_in", "reshard_in_start"])
def test_explain_has_the_call_of_the_program(monkeypatch, op):
    """Of uneven shards, which their arrays hold with gaps, and of ranks without one."""
    calls, resolve = [], plan.resolve
    monkeypatch.setattr(plan, "resolve", lambda *given, **rows: calls.append(given[:5]) or resolve(*given, **rows))
    source = jaxcomm.RankSharding(np.arange(8)[::-1].reshape(2, 4), ("p", "q"), P("p", "q"))
    sides = source, jaxcomm.RankSharding(np.array([3, 5, 1]), ("r",), P(None, "r"))
    f = functools.partial(getattr(jaxcomm, op), axis_name="r", source=sides[0], destination=sides[1], shape=(5, 10))
    f = jax.shard_map(f, mesh=mesh(range(8), r=8), in_specs=P("r"), out_specs=P("r"))
    jax.jit(f).lower(jax.ShapeDtypeStruct((24, 3), "int4"))
    jaxcomm.explain(op, jax.ShapeDtypeStruct((5, 10), "int4"), 8, shardings=sides)
    (_, made, *rest), (_, told, *others) = calls[:2]
    names = ("group_size", "sources", "destinations", "input_shape", "output_shape", "asynchronous")
    assert rest == others and all(np.array_equal(made[name], told[name]) for name in names)


@pytest.mark.parametrize(("max_bytes", "programs"), [(None, 2), (128, 3), (64, 4), (1, 4)])
def test_no_group_of_arrays_has_more_than_max_bytes(max_bytes, programs, monkeypatch):
    """A device receives 64 bytes of each array. Arrays that stay have no group, others one for their devices.

    Programs have different numbers. With a limit, each waits for the one before.
    """
    groups, runs, program = [], [], _reshard._program

    def noted(devices, keys, *rest):
        groups.append(keys)
        run = program(devices, keys, *rest)
        return lambda numbers, *given: runs.append((numbers[1], given[-1])) or run(numbers, *given)

    monkeypatch.setattr(_reshard, "_program", noted)
    arrays = [resharding.place(np.full((8, 8), i, np.float32), ROWS) for i in range(5)]
    targets = [COLUMNS, COLUMNS, ROWS, COLUMNS, NamedSharding(mesh([5], a=1), P())]
    moved = jaxcomm.reshard(arrays, targets, max_bytes=max_bytes)
    assert len(groups) == programs and sum(map(len, groups)) == 4
    assert runs == [(number, max_bytes is not None) for number in range(programs)]
    assert [x[0, 0] for x in moved] == [0, 1, 2, 3, 4]


def test_a_failed_group_leaves_its_donated_arrays(x, monkeypatch):
    """The second of three groups fails."""
    program, calls = _reshard._program, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("a test")
        return program(*args)

    monkeypatch.setattr(_reshard, "_program", failing)
    arrays = [x, x + 1, x + 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="a test"):
        jaxcomm.reshard(arrays, COLUMNS, donate=True, max_bytes=1)
    assert [x.is_deleted() for x in arrays] == [True, False, False]


def typed(sharding, dtype, shape=(8, 8)):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.mark.parametrize("algorithm", ["direct", "xla"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("float32", "bfloat16"), ("int8", "float32"), ("float32", "bool"), ("int4", "int8"), ("bfloat16", "complex128")],
)
def test_a_target_with_an_element_type_changes_it(algorithm, old, new):
    x = resharding.values((8, 8), jnp.dtype(old), 1)
    for target in (ROWS, COLUMNS):
        array = resharding.place(x, ROWS)
        moved = jaxcomm.reshard(array, typed(target, new), algorithm=algorithm, donate=True)
        resharding.check(moved, x.astype(made := jax.dtypes.canonicalize_dtype(new)), target)
        assert array.is_deleted()
    jaxcomm.reshard(array := resharding.place(x, ROWS), typed(COLUMNS, new), algorithm=algorithm)
    assert not array.is_deleted()
    empty = jaxcomm.reshard(resharding.place(x[:0], ROWS), typed(COLUMNS, new, (0, 8)), algorithm=algorithm)
    assert (empty.dtype, empty.sharding) == (made, COLUMNS)


def test_calls_under_another_mesh(x):
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
        for _ in range(2):
            moved = jaxcomm.reshard(x, NamedSharding(mesh([6, 2], a=2), P("a")))
    resharding.check(moved, np.asarray(x), moved.sharding)


@pytest.mark.parametrize(("old", "new"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_smaller_type_travels(old, new, monkeypatch):
    sent = noted(monkeypatch, lambda x, **_: x.dtype)
    target = NamedSharding(mesh([4, 3], a=2), P("a"))  # of no other test, so there is no program yet
    jaxcomm.reshard(resharding.place(resharding.values((8, 8), jnp.dtype(old), 1), ROWS), typed(target, new))
    assert sent == ["bfloat16"]


def noted(monkeypatch, what):
    """what(x, **parameters) of each array, in the order in which programs are traced."""
    found = []

    def bind(x, *after, **rest):
        found.append(what(x, **rest))
        return _PRIMITIVE.bind(x, *after, **rest)

    monkeypatch.setattr(_reshard, "reshard_p", types.SimpleNamespace(bind=bind))
    return found


def test_calls_that_differ_in_one_option_have_their_own_programs(x, monkeypatch):
    """XLA's own copies need none."""
    found = noted(monkeypatch, lambda x, call, timeout_ms, **_: (call.algorithm, timeout_ms))
    target = NamedSharding(mesh([5, 1], a=2), P("a"))  # of no other test
    for _ in range(2):
        for options in ({}, {"timeout_s": 60.25}, {"algorithm": "direct"}, {"algorithm": "xla"}):
            resharding.check(jaxcomm.reshard(x, target, **options), np.asarray(x), target)
    assert found == [(None, 0), (None, 60_250), ("direct", 0)]


def test_a_terminal_shows_the_progress(x, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(_reshard, "_SILENT_S", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    jaxcomm.reshard([x, x + 1], COLUMNS)  # does not wait
    assert sys.stderr.getvalue() == ""
    jaxcomm.reshard([x, x + 1], COLUMNS, max_bytes=1)
    assert "reshard: 100%" in sys.stderr.getvalue() and "512/512" in sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "ring"}, "unknown algorithm 'ring'; pass one of direct, hierarchical, xla"),
        ({"max_bytes": 0}, "max_bytes must be positive"),
        *(({"timeout_s": limit}, "timeout_s must be a number between 0.001 and 1e.09") for limit in (0, math.inf, "3")),
    ],
)
def test_wrong_options_are_named(options, text, x):
    with pytest.raises(ValueError, match=text):
        jaxcomm.reshard(x, COLUMNS, **options)


def test_xla_between_processes_has_no_limit(x, monkeypatch):
    monkeypatch.setattr(_reshard, "_processes", lambda devices: (0, 1))
    with pytest.raises(
        ValueError, match=r"timeout_s does not limit XLA's collectives, which move \['b'\] \(asked for\)"
    ):
        jaxcomm.reshard({"a": x, "b": x}, {"a": ROWS, "b": COLUMNS}, algorithm="xla", timeout_s=5)


def test_arrays_that_are_donated_twice_or_deleted_are_named(x):
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] are the same array"):
        jaxcomm.reshard({"a": x, "b": x}, COLUMNS, donate=True)
    assert not x.is_deleted()
    x.delete()
    with pytest.raises(ValueError, match=r"x has been deleted or donated"):
        jaxcomm.reshard(x, COLUMNS)


def test_the_setting_selects_device_put(x, monkeypatch):
    monkeypatch.setattr(_lowering, "config", lambda: _config.Config(algorithm="xla"))
    monkeypatch.setattr(_reshard, "_why_xla", _reshard._why_xla.__wrapped__)
    before, target = _reshard._program.cache_info().misses, NamedSharding(mesh([3, 6], a=2), P("a"))  # of no other test
    resharding.check(jaxcomm.reshard(x, target), np.asarray(x), target)
    assert _reshard._program.cache_info().misses == before


def test_a_thread_waits_for_its_turn_until_the_time_limit():
    """And has its number all the same, because the other processes count the call."""
    devices = [types.SimpleNamespace(process_index=process) for process in (10, 11)]
    late = pytest.raises(jax.errors.JaxRuntimeError, match=r"another thread's call, .*\(10, 11\).* 0.01 s")
    with _reshard._numbered([devices], None) as first, late, _reshard._numbered([devices], 0.01):
        pass
    with _reshard._numbered([devices], 0.01) as third:
        assert [numbers[10, 11] for numbers in (first, third)] == [1, 3]
