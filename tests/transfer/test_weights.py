"""publish() and fetch() between endpoints, against NumPy."""

import ctypes
import itertools
import math
import pathlib
import re
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tqdm
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import SECRET, open_lease

import jaxcomm
from jaxcomm import transfer
from jaxcomm.recorder._prometheus import text
from jaxcomm.transfer import _arrays, _plan, _weights
from jaxcomm.transfer._endpoint import Limit, _interface, _key_of

SPECS = [P(), P("a"), P(None, "a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))]
MESHES = [
    Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")),
    Mesh(np.array(jax.devices()[:8])[::-1].reshape(4, 2), ("a", "b")),
]


@pytest.fixture(params=[True, False], ids=["shared_memory", "tcp"])
def pair(request):
    names = ("source", "reader")
    source, reader = (transfer.Endpoint(n, secret=SECRET, shared_memory=request.param) for n in names)
    with source, reader:
        yield source, reader


def fetch(pair, version, shardings, name="x", timeout_s=60.0):
    source, reader = pair
    group = transfer.Group(source.address)
    return transfer.fetch(reader, group, name, version, shardings, timeout_s=timeout_s).result()


def numbers(shape, dtype):
    return (np.arange(np.prod(shape)) % 113).astype(dtype).reshape(shape)


def test_any_sharding_to_any_other(pair, monkeypatch):
    """The second fetch is by the plan of the first one. The last ones have several reads of a few pieces each."""
    x = numbers((16, 24, 2), np.float32)
    here, there = MESHES
    cases = list(itertools.product(SPECS, SPECS))
    shardings = {str(i): NamedSharding(there, spec) for i, (_, spec) in enumerate(cases)}
    for version in (1, 2, 3, 4):
        if version == 3:
            monkeypatch.setattr(_plan, "_PIECES_PER_READ", 7)
            pair[1]._plans.clear()
        values = {str(i): x * version + i for i in range(len(cases))}
        tree = {i: jax.device_put(values[i], NamedSharding(here, cases[int(i)][0])) for i in values}
        transfer.publish(pair[0], "x", tree, version)
        for i, array in fetch(pair, version, shardings).items():
            want = jax.device_put(values[i], shardings[i])
            assert (array.sharding, array.aval, array.committed) == (want.sharding, want.aval, want.committed)
            np.testing.assert_array_equal(array, values[i], err_msg=str(cases[int(i)]))
            on, on_want = ([s.data.devices() for s in x.addressable_shards] for x in (array, want))
            assert on == on_want


@pytest.mark.parametrize("dtype", ["bool", "int4", "int8", "uint16", "float8_e4m3fn", "bfloat16", "complex64"])
def test_dtypes_and_shapes(pair, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shapes = [(), (0, 3), (5,), (1, 7, 2), (300, 1001)]
    tree = [(numbers(shape, np.int32) % 2).astype(kind) for shape in shapes]
    transfer.publish(pair[0], "x", [jnp.asarray(x) for x in tree], 1)
    one = NamedSharding(MESHES[0], P())
    for _ in range(2):  # the second one is by plan
        for want, got in zip(tree, fetch(pair, 1, [one, None, None, one, one]), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            np.testing.assert_array_equal(np.asarray(got), want)


def test_elements_of_64_bits_are_what_jax_makes_of_them(pair):
    x = np.arange(3) + 0.1
    transfer.publish(pair[0], "x", x, 1)
    for has_64_bits in (False, False, True, True, False):
        with jax.enable_x64(has_64_bits):
            got = fetch(pair, 1, NamedSharding(MESHES[0], P()))[""]
            assert got.dtype == jnp.asarray(x).dtype
            np.testing.assert_array_equal(got, x.astype(got.dtype))


def test_versions_are_exact(pair):
    source, reader = pair
    for version in (3, 5, 6):
        transfer.publish(source, "x", {"w": np.full(9, version)}, version, keep=2)
    for version in (5, 6):
        np.testing.assert_array_equal(fetch(pair, version, None)["['w']"], np.full(9, version))
    assert fetch(pair, "latest", None)["['w']"][0] == 6
    with pytest.raises(transfer.VersionGone, match=r"'x' version 3 of endpoint 'source'.*retired"):
        fetch(pair, 3, None)
    with pytest.raises(transfer.NotFound, match="the newest version is 6"):
        fetch(pair, 7, None)
    with pytest.raises(transfer.NotFound, match="'y' version 6"):
        fetch(pair, 6, None, name="y")
    with pytest.raises(ValueError, match="must be later than version 6"):
        transfer.publish(source, "x", {"w": np.zeros(9)}, 6)
    assert fetch(pair, np.int64(5), None)["['w']"][0] == 5, "a refused version retires none"
    transfer.retire(source, "x", 6)
    transfer.retire(source, "x", 6)
    with pytest.raises(transfer.VersionGone):
        fetch(pair, 6, None)
    assert fetch(pair, "latest", None)["['w']"][0] == 5
    assert next(transfer.watch(reader, transfer.Group(source.address), "x", timeout_s=60)) == 5
    failures = {name: n for name, n in reader.stats().items() if name.startswith("failures_") and n}
    assert failures == {"failures_gone": 2, "failures_unknown": 2} and source.stats()["requests_refused"] == 4


def test_the_plan_of_an_earlier_fetch_holds_for_equal_manifests_only(pair):
    shapes = [(8, 6), (8, 6), (10, 6), (8, 6)]
    here = [P("a"), P("a"), P("a"), P(None, "b")]
    target = NamedSharding(MESHES[1], P("b", None))
    for version, (shape, spec) in enumerate(zip(shapes, here, strict=True)):
        x = numbers(shape, np.int32) + version
        transfer.publish(pair[0], "x", jax.device_put(x, NamedSharding(MESHES[0], spec)), version)
        for _ in range(2):
            np.testing.assert_array_equal(fetch(pair, "latest", target)[""], x)
    stats = pair[1].stats()
    assert stats["tcp_received_bytes"] + stats["shared_memory_received_bytes"] == 8 * sum(map(np.prod, shapes))
    assert sum(n for name, n in stats.items() if name.startswith("failures_")) == 0
    wait_until(lambda: pair[0].stats()["leases"] == 0)


def test_a_plan_is_for_one_structure_and_one_group(pair, monkeypatch):
    """Fetches that differ in this alone."""
    x, sharding = numbers((8, 6), np.int32), NamedSharding(MESHES[1], P("b"))
    transfer.publish(pair[0], "x", {"w": x}, 1)
    for _ in range(2):
        assert list(fetch(pair, 1, sharding)) == ["['w']"]
        assert list(fetch(pair, 1, {"w": sharding})) == ["w"]
        assert fetch(pair, 1, {"w": None})["w"].__class__ is np.ndarray
        with pytest.raises(transfer.Refused, match="missing"):
            fetch(pair, 1, {"v": sharding})
    with transfer.Endpoint("second", secret=SECRET) as second:
        transfer.publish(second, "x", {"w": x + 1}, 1)
        for source, more in ((second, 1), (pair[0], 0)):
            np.testing.assert_array_equal(fetch((source, pair[1]), 1, sharding)["['w']"], x + more)
        group = transfer.Group([pair[0].address, second.address])
        got = transfer.fetch(pair[1], group, "x", 1, sharding).result()["['w']"]
        assert {0, 1} == set(np.unique(got - x)), "each writer sends a part"
    before = list(pair[1]._plans)
    monkeypatch.setattr(_weights, "_MOST_PLANS", len(before))
    fetch(pair, 1, None)
    assert list(pair[1]._plans)[:-1] == before[1:], "the oldest one makes room"


def test_the_recorder_has_the_counters_of_endpoints(pair):
    source, reader = pair
    transfer.publish(source, "x", np.zeros(500_000), 1)
    assert next(transfer.watch(reader, transfer.Group(source.address), "x")) == 1
    fetch(pair, 1, None)
    for name in ("y", "z"):
        reader._native.watch(reader._peer(source.address), _key_of(name), -1)
    found = next(each for each in jaxcomm.recorder.stats().transfers if each.endpoint == "reader")
    for name, waiting in zip("yz", found.waiting, strict=True):  # the longest first
        assert re.fullmatch(rf"watch of '{name}' at endpoint 'source' \(incarnation .*\): \d+\.\d s", waiting)
    assert found.counters == reader.stats()
    for name, counts in found.histograms.items():
        time_us = found.counters[f"{name}_us"]  # of the only one
        assert [(sum(counts[: i + 1]) > 0) for i in range(36)] == [time_us < 2**i for i in range(36)]
    path = "tcp" if source.address.endswith("/") else "shared_memory"
    none = dict.fromkeys(found.traffic["source"], 0)
    assert found.traffic == reader.traffic() == {"source": none | {f"{path}_received_bytes": 4_000_000}}
    assert source.traffic() == {"reader": none | {f"{path}_sent_bytes": 4_000_000}}
    transfer.publish(source, "empty", np.zeros(0), 1)
    for _ in range(2):  # by plan, the second one reads nothing in a read
        fetch(pair, 1, None, name="empty")
    stages = sum(reader.stats()[f"read_{stage}_us"] for stage in ("wait", "wire", "place", "commit"))
    assert 0 <= reader.stats()["read_us"] - stages <= 5, "each is rounded down"
    assert 'jaxcomm_transfer_leases_granted_total{process="0",endpoint="source"} 3' in text(jaxcomm.recorder.stats(), 0)


def test_several_writers_share_the_work_and_agree_on_a_version(pair):
    x, sharding = numbers((64, 64), np.int32), NamedSharding(MESHES[0], P("a", "b"))
    with transfer.Endpoint("second", secret=SECRET, shared_memory=False) as second:
        group = transfer.Group([pair[0].address, second.address])
        for version, writers in ((1, [pair[0], second]), (2, [pair[0]])):
            for writer in writers:
                transfer.publish(writer, "x", jnp.asarray(x + version), version, keep=2)
        target = NamedSharding(MESHES[1], P("b", "a"))
        fetched = transfer.fetch(pair[1], group, "x", "latest", target).result()
        np.testing.assert_array_equal(fetched[""], x + 1)  # the newest version that both have
        sent = [sum(n for k, n in each.stats().items() if k.endswith("sent_bytes")) for each in (pair[0], second)]
        assert sent == [x.nbytes // 2] * 2
        others = jnp.zeros((64, 65), jnp.int32), jnp.zeros((64, 64), jnp.uint32), {"w": jnp.asarray(x)}
        for version, other in enumerate(others, 3):
            transfer.publish(pair[0], "x", x, version)
            transfer.publish(second, "x", other, version)
            with pytest.raises(transfer.Refused, match="'x' has other arrays at endpoint 'second'"):
                transfer.fetch(pair[1], group, "x", version, sharding).result()
        transfer.publish(pair[0], "x", x, 6)  # retires the version that the other one has
        future = transfer.fetch(pair[1], group, "x", "latest", sharding)
        wait_until(lambda: pair[1].stats()["failures_gone"] > 0)
        transfer.publish(second, "x", x, 6)
        np.testing.assert_array_equal(future.result()[""], x)
    wait_until(lambda: pair[0].stats()["leases"] == 0)


def test_memory_is_used_again_once_nobody_has_it(pair):
    x = _arrays.empty((300, 1000), np.int32)
    place, view = x.ctypes.data, x[7:9].T
    del x
    other = _arrays.empty((300, 1000), np.int32)
    assert other.ctypes.data != place, "a view has it"
    del view
    assert _arrays.empty((1000, 300), np.int32).ctypes.data == place
    assert all(_arrays.empty((n,), np.int8).ctypes.data % 64 == 0 for n in range(1, 50)), "else JAX copies it"
    for version in (1, 2):
        transfer.publish(pair[0], "x", np.full((300, 1000), version), version, keep=2)
    sharding = NamedSharding(MESHES[0], P("a"))
    trees = [fetch(pair, version, sharding) for version in (1, 2, 2, 1)]
    assert [np.unique(tree[""]).tolist() for tree in trees] == [[1], [2], [2], [1]]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_counts_all_bytes_once(pair, monkeypatch, terminal):
    bars, x = mock.MagicMock(), np.ones(1 << 18)
    bar = bars.return_value.__enter__.return_value
    bar.n = 0  # always: the bar is told the whole amounts
    monkeypatch.setattr(tqdm, "tqdm", bars)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(_weights, "_BAR_EVERY_S", 0)
    monkeypatch.setattr(_plan, "_PIECES_PER_READ", 1)
    transfer.publish(pair[0], "x", [x, x], 1)
    fetch(pair, 1, None)
    amounts = [call.args[0] for call in bar.update.call_args_list]
    assert amounts == sorted(amounts) and amounts[-1:] == [2 * x.nbytes] * terminal
    assert not terminal or bars.call_args.kwargs["total"] == 2 * x.nbytes


def test_donations_and_snapshots_are_copies(pair):
    """XLA keeps what the endpoint holds, so a step that updates its weights in place does not change the version."""
    want = numbers((256, 256), np.float32)
    x, host = jax.device_put(want.copy(), NamedSharding(MESHES[0], P("a"))), want.copy()
    transfer.publish(pair[0], "x", x, 1)
    transfer.publish(pair[0], "x", host, 2, snapshot=True, keep=2)
    jax.jit(lambda y: y + 1, donate_argnums=0)(x).block_until_ready()
    host[:] = -1
    for version in (1, 2):
        np.testing.assert_array_equal(fetch(pair, version, None)[""], want)


def test_revoking_ends_leases(pair):
    source, reader = pair
    for version in (1, 2):
        transfer.publish(source, "x", np.zeros(1000), version, keep=2)
    lease, *revoked = (open_lease(reader, source.address, version=version) for version in (1, 2, 2))
    for version in (1, 1, 2):
        transfer.retire(source, "x", version, revoke=version == 2)
    assert len(source._kept) == 1, "the lease keeps the memory"
    into = np.ones(1000)
    whole = [(0, (0,), (1000,))]
    lease.wait(lease.read(whole, whole, [_argument(into)]), Limit(10))
    assert not into.any()
    for each in revoked:
        with pytest.raises(transfer.Revoked, match=r"test: 'x' version 2 of endpoint 'source' .*took it back"):
            each.wait(each.read(whole, whole, [_argument(into)]), Limit(10))
    assert (source.stats()["leases_revoked"], reader.stats()["failures_revoked"]) == (2, 2)
    lease.close()
    wait_until(lambda: not source._kept)


def test_leases_are_renewed_without_the_interpreter(pair):
    source, _ = pair
    transfer.publish(source, "x", np.zeros(10), 1)
    limits, began = transfer.Limits(lease_s=0.5), time.monotonic()
    with transfer.Endpoint("short", secret=SECRET, limits=limits) as reader:
        for _ in range(2):
            open_lease(reader, source.address)
        ctypes.PyDLL(None).usleep(1_500_000)  # holds the lock of the interpreter
        assert source.stats()["leases"] == 2, "its endpoint renews the leases"
        assert 4 <= source.stats()["leases_renewed"] <= 2 * (2 + 6 * (time.monotonic() - began)), "by thirds"
    wait_until(lambda: source.stats()["leases"] == 0)


def wait_until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _argument(x):
    return x.ctypes.data, x.itemsize, x.shape, x.strides, -1, []


def test_boxes_outside_are_refused(pair):
    source, reader = pair
    transfer.publish(source, "x", np.zeros((4, 4)), 1)
    lease = open_lease(reader, source.address)
    into = np.zeros((9, 9))
    outside = [((0, 0), (4, 5)), ((-1, 0), (2, 2)), ((3, 0), (2, 4)), ((0,), (2,)), ((0, 0, 0), (1, 1, 1))]
    for array, (begin, end) in [*((0, box) for box in outside), (7, ((0, 0), (1, 1)))]:
        read = lease.read([(array, begin, end)], [(0, (0, 0), (1, 1))], [_argument(into)])
        with pytest.raises(transfer.Refused, match=r"in dimension|of an array|no array 7"):
            lease.wait(read, Limit(10))
    assert not into.any() and reader.stats()["failures_invalid"] == 6


@pytest.mark.skipif(
    pathlib.Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1", reason="this kernel allocates anything"
)
def test_more_than_the_host_has(pair, tmp_path):
    x = np.memmap(tmp_path / "sparse", np.uint8, "w+", shape=10**12)
    transfer.publish(pair[0], "x", x, 1)
    want = r"'x' of endpoint 'source' .* cannot allocate 1000000000000 bytes"
    for _ in range(2):
        with pytest.raises(transfer.Refused, match=want):
            fetch(pair, 1, None)
    wait_until(lambda: pair[0].stats()["leases"] == 0)


def test_wrong_trees_and_shardings(pair):
    transfer.publish(pair[0], "x", {"w": np.zeros((3, 4)), "b": np.zeros(4)}, 1)
    sharding = NamedSharding(MESHES[0], P("a"))
    with pytest.raises(transfer.Refused, match=r"structure of 'x': missing \[\"\['b'\]\"\], unknown \[\"\['c'\]\"\]"):
        fetch(pair, 1, {"w": None, "c": None})
    with pytest.raises(transfer.Refused, match=r"the sharding of 'x'\['w'\] does not fit shape \(3, 4\)"):
        fetch(pair, 1, {"w": sharding, "b": None})
    group = transfer.Group(pair[0].address)
    for version in ("newest", True, -1, 1.0):
        with pytest.raises(ValueError, match="version must be an integer of at least 0"):
            fetch(pair, version, None)
    for limit in (math.nan, -1, "3", None):
        with pytest.raises(ValueError, match="timeout_s must be a number"):
            fetch(pair, 1, None, timeout_s=limit)
    with pytest.raises(ValueError, match="watch: after must be an integer"):
        next(transfer.watch(pair[1], group, "x", after=-2))


@pytest.mark.parametrize(
    "data",
    [np.array(["a"], object), np.zeros(3, "i4,f4"), np.zeros(3, ">f4"), np.zeros(3, "M8[s]"), jax.random.key(0), 1.0],
    ids=str,
)
def test_data_that_other_jobs_cannot_read(pair, data):
    with pytest.raises(ValueError, match=r"publish: 'x'\['w'\] must be an array with an element type of data"):
        transfer.publish(pair[0], "x", {"w": data}, 1)
    if isinstance(data, np.ndarray):
        with pytest.raises(ValueError, match="PageLayout: dtype must be an element type of data"):
            transfer.PageLayout(1, 1, 1, data.dtype)


@pytest.mark.parametrize(("version", "keep"), [(-1, 1), (True, 1), (1.0, 1), ("1", 1), (1, 0), (1, 1.5)])
def test_numbers_that_publish_refuses(pair, version, keep):
    with pytest.raises(ValueError, match=r"publish: (version|keep) must be an integer of at least [01], got"):
        transfer.publish(pair[0], "x", np.zeros(3), version, keep=keep)


EVERYWHERE = ["0.0.0.0:0", "[::]:0", "[::0]:0", "[0:0::0]:0", "[::ffff:0.0.0.0]:0", "[::%lo]:0"]
NO_ADDRESS = ["0:0", "0x0:0", "0.0:0", "000.0.0.0:0", "localhost:0", "127.0.0.1", ":0", "", 80, "[127.0.0.1:0"]
NO_PORT = ["127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:", "127.0.0.1:http", "[::1]:\u00b2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"listen": listen}, "listen must name one interface of a host") for listen in EVERYWHERE),
        *(({"listen": listen}, "listen: .* is no address: expected host:port") for listen in NO_ADDRESS),
        *(({"listen": listen}, "listen must have a port from 0 to 65535") for listen in NO_PORT),
        *(({"secret": secret}, "at least 16 bytes") for secret in ("short", 16, list(range(16)), None)),
        ({"name": "a/b"}, "name of an endpoint"),
    ],
    ids=str,
)
def test_endpoints_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        transfer.Endpoint(**{"name": "x", "secret": SECRET, **arguments}).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connections", 0), ("connections", 2.5), ("transfers", -1), ("transfers", True),
        ("lease_s", 4e-4), ("lease_s", "3"), ("max_lease_s", math.inf), ("max_lease_s", math.nan),
    ],
)  # fmt: skip
def test_limits_that_cannot_be(field, value):
    with pytest.raises(ValueError, match=f"Limits: {field} must be an? (integer|number)"):
        transfer.Limits(**{field: value})
    transfer.Limits(lease_s=1e-3, max_lease_s=1e9, connections=10**6, transfers=1)
    assert _interface("listen", "[::1]:65535") == ("::1", "65535")
