"""Sources that hold the same: if one is lost, the others send what it has not sent."""

import concurrent.futures
import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import LARGE, LIMIT_S, SECRET, Link, halves_of, job, large_offer, large_prefill, replica, replicated
from test_pages import LAYOUT, check, write
from test_weights import open_lease, wait_until

from jaxcomm import transfer
from jaxcomm.transfer import _plan, _weights

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


def test_what_follows_the_first_elements_of_a_box():
    for sizes in [(), (1,), (7,), (3, 4), (2, 1, 3), (2, 3, 2, 2)]:
        begin = tuple(range(5, 5 + len(sizes)))
        box = begin, tuple(b + n for b, n in zip(begin, sizes, strict=True))
        for count in range(int(np.prod(sizes)) + 1):
            times = np.zeros([n + 10 for n in sizes], np.int32)
            for first, last in _plan._after(box, count):
                times[tuple(map(slice, first, last))] += 1
            want = np.zeros_like(times)
            want[tuple(map(slice, *box))] = (np.arange(np.prod(sizes)) >= count).reshape(sizes)
            np.testing.assert_array_equal(times, want, f"{sizes} after {count}")


@pytest.mark.parametrize(
    ("sent_bytes", "shards_of"), [(1, _weights._shards), (2**20, halves_of), (5 * 2**20, _weights._shards)]
)
def test_a_writer_that_is_killed_while_it_sends(sent_bytes, shards_of):
    """Both writers have all elements, the second one in other shards. Of halves, one read has two pieces of one."""
    tree = replicated()
    with (
        transfer.Endpoint("reader", secret=SECRET, shared_memory=False) as reader,
        transfer.Endpoint("second", secret=SECRET) as second,
        job(replica, shards_of) as first,
    ):
        specs = {"v": P(None, "a"), "w": P("b")}
        there = {name: jax.device_put(x, NamedSharding(MESH, specs[name])) for name, x in tree.items()}
        transfer.publish(second, "weights", there, 1)
        with contextlib.closing(Link(first.receive(), sent_bytes)) as link:
            group = transfer.Group([link.address, second.address])
            here = {"v": NamedSharding(MESH, P(("a", "b"))), "w": None}
            future = transfer.fetch(reader, group, "weights", 1, here, timeout_s=LIMIT_S)
            wait_until(link.is_cut, LIMIT_S)
            first.kill()
            link.mend()
            for name, x in future.result().items():
                np.testing.assert_array_equal(x, tree[name])
            assert reader.stats()["tcp_received_bytes"] == sum(x.nbytes for x in tree.values()), "no byte comes twice"
            assert reader.stats()["failures_timeout"] == 0
            again = transfer.fetch(reader, group, "weights", "latest", here).result()
            np.testing.assert_array_equal(again["v"], tree["v"])
        wait_until(lambda: second.stats()["leases"] == 0)


def test_a_writer_without_a_part_takes_over_in_a_planned_fetch():
    """Both writers have the same shards, so the plan of the first fetch reads everything from the first one."""
    tree = replicated()
    with (
        transfer.Endpoint("reader", secret=SECRET, shared_memory=False) as reader,
        transfer.Endpoint("second", secret=SECRET) as second,
        job(replica) as first,
    ):
        transfer.publish(second, "weights", tree, 1)
        with contextlib.closing(Link(first.receive(), sum(x.nbytes for x in tree.values()) + 5 * 2**20)) as link:
            group = transfer.Group([link.address, second.address])
            here = {"v": None, "w": None}
            earlier = transfer.fetch(reader, group, "weights", 1, here, timeout_s=LIMIT_S).result()
            (plan,) = reader._plans.values()
            assert [len(of_writer) for of_writer in plan.reads] == [1, 0]
            future = transfer.fetch(reader, group, "weights", 1, here, timeout_s=LIMIT_S)
            wait_until(link.is_cut, LIMIT_S)
            first.kill()
            link.mend()
            for name, x in future.result().items():
                np.testing.assert_array_equal(x, tree[name])
                assert not np.shares_memory(x, earlier[name])
        wait_until(lambda: second.stats()["leases"] == 0)


def part_of(x, rows):
    """The shards of a process that has some rows of an array."""
    return {((rows.start, 0), (rows.stop, x.shape[1])): x[rows]}


def test_a_fetch_by_plan_never_mixes_versions(monkeypatch):
    """Each of two writers has half of the rows. One publishes the next version before the other one."""
    x = np.arange(64, dtype=np.int32).reshape(8, 8)
    with contextlib.ExitStack() as stack:
        reader, *writers = (stack.enter_context(transfer.Endpoint(name, secret=SECRET)) for name in ("r", "a", "b"))
        group = transfer.Group([writer.address for writer in writers])
        for i, version, newest in ((0, 1, None), (1, 1, 1), (0, 2, 1), (1, 2, 2)):
            monkeypatch.setattr(_weights, "_shards", functools.partial(part_of, rows=slice(4 * i, 4 * i + 4)))
            transfer.publish(writers[i], "x", {"w": x * version}, version, keep=2)
            if newest:
                found = transfer.fetch(reader, group, "x", "latest", {"w": None}, timeout_s=LIMIT_S).result()
                np.testing.assert_array_equal(found["w"], x * newest)


@pytest.mark.parametrize("planned", [False, True])
def test_writers_that_are_lost_before_the_fetch(monkeypatch, planned):
    """Rows 4 to 8 are at two of three writers. `planned`: an earlier fetch has left its plan."""
    x = np.arange(64, dtype=np.int32).reshape(8, 8)
    with transfer.Endpoint("reader", secret=SECRET) as reader, contextlib.ExitStack() as stack:
        writers = [stack.enter_context(transfer.Endpoint(f"writer-{i}", secret=SECRET)) for i in range(3)]
        for writer, rows in zip(writers, (slice(0, 4), slice(4, 8), slice(4, 8)), strict=True):
            monkeypatch.setattr(_weights, "_shards", functools.partial(part_of, rows=rows))
            transfer.publish(writer, "x", {"w": x}, 3)
        group = transfer.Group([writer.address for writer in writers])

        def fetched(version):
            target = {"w": NamedSharding(MESH, P("a"))}
            return transfer.fetch(reader, group, "x", version, target, timeout_s=LIMIT_S).result()["w"]

        if planned:
            np.testing.assert_array_equal(fetched(3), x)
        writers[1].close()
        for version in ("latest", 3):
            np.testing.assert_array_equal(fetched(version), x)
        monkeypatch.setattr(_weights, "_shards", functools.partial(part_of, rows=slice(4, 8)))
        transfer.publish(writers[2], "x", {"w": x}, 4)
        with pytest.raises(transfer.VersionGone, match="'writer-2'"):
            fetched(3)
        with pytest.raises(transfer.NotFound, match="'writer-0'"):
            fetched(4)
        writers[2].close()
        with pytest.raises(transfer.PeerLost, match="endpoint 'writer-1'"):
            fetched(3)


def test_watch_yields_the_version_that_all_writers_have():
    first, second, reader = (transfer.Endpoint(name, secret=SECRET) for name in ("first", "second", "reader"))
    with first, second, reader:
        for writer, versions in ((first, [1]), (second, [1, 2, 3])):
            for version in versions:
                transfer.publish(writer, "x", {"w": np.full(3, version)}, version, keep=3)
        for addresses in ([first.address, second.address], [second.address, first.address]):
            assert next(transfer.watch(reader, transfer.Group(addresses), "x", timeout_s=60)) == 1
        transfer.publish(first, "x", {"w": np.full(3, 2)}, 2)
        assert next(transfer.watch(reader, transfer.Group(addresses), "x", after=1, timeout_s=60)) == 2
        for lost in addresses:  # a firewall has ended an idle connection
            reader._native.disconnect(reader._peers[lost])
        assert next(transfer.watch(reader, transfer.Group(addresses), "x", after=1, timeout_s=60)) == 2
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            later = thread.submit(next, transfer.watch(reader, transfer.Group(addresses), "x", after=3))
            wait_until(reader.waiting)
            second.close()
            with pytest.raises(transfer.PeerLost, match="watch: 'x' of endpoint 'second'"):
                later.result()


def test_a_reader_that_no_longer_watches_and_leaves_ends_no_other_watch():
    """Both readers give their watches the same number."""
    writer, first, second = (transfer.Endpoint(name, secret=SECRET) for name in ("writer", "first", "second"))
    with writer, first, second, concurrent.futures.ThreadPoolExecutor(1) as thread:
        group = transfer.Group(writer.address)
        found = thread.submit(next, transfer.watch(first, group, "x", timeout_s=60))
        with pytest.raises(transfer.TransferTimeout, match=r"watch: 'x' of endpoint 'writer' .*within 0\.5 s"):
            next(transfer.watch(second, group, "x", timeout_s=0.5))
        transfer.publish(writer, "y", np.zeros(3), 1)
        for each in (first, second):
            open_lease(each, writer.address, "y")
        second.close()
        wait_until(lambda: writer.stats()["leases"] == 1)  # the writer has noticed
        transfer.publish(writer, "x", {"w": np.zeros(3)}, 4)
        assert found.result() == 4


@contextlib.contextmanager
def pool_of():
    with transfer.Endpoint("decode", secret=SECRET, shared_memory=False) as endpoint:
        pool = transfer.PagePool(endpoint, LARGE, 4)
        yield endpoint, pool, pool.allocate(2)


def check_layer(pool, pages, layer):
    want = np.arange(2 * pool.arrays[0][0].size).reshape(pool.arrays[0][pages].shape) + layer
    np.testing.assert_array_equal(pool.arrays[layer][pages], want)


def test_a_source_of_pages_that_is_killed_while_it_sends():
    """A layer of which a part has arrived begins again at the other source of these heads, also inside a program."""
    with (
        pool_of() as (reader, pool, pages),
        transfer.Endpoint("second", secret=SECRET) as second,
        job(large_prefill) as first,
    ):
        (address, ticket), other = first.receive().split("#"), large_offer(second)
        with contextlib.closing(Link(address, 3 * 2**20)) as link:
            pull = transfer.pull(pool, [f"{link.address}#{ticket}", other.ticket], pages)
            insert = jax.jit(functools.partial(transfer.insert, layout=LARGE))
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                inserted = thread.submit(insert, np.zeros(LARGE.shape(2), np.int32), pull.handle, np.arange(2), 1)
                # Frames have half a MiB, and the last one before the cut may lack its end.
                wait_until(lambda: link.is_cut() and reader.stats()["tcp_received_bytes"] > 2**21, LIMIT_S)
                pull.wait(0, timeout_s=LIMIT_S)
                assert not pull.is_ready(1)
                first.kill()
                link.end_connections()
                pull.wait(timeout_s=LIMIT_S)
                np.testing.assert_array_equal(inserted.result(), pool.arrays[1][pages])
            for layer in range(2):
                check_layer(pool, pages, layer)
            assert reader.stats()["failures_lost"] == 0
        wait_until(lambda: other.done)


def test_heads_of_a_lost_source_come_from_one_that_has_them():
    """Sources of the first heads, of the last ones and of all, with other page sizes. The second one is lost."""
    layouts = [dataclasses.replace(LAYOUT.of_rank(i % 2, 2), page_tokens=2 + i) for i in range(3)]
    layouts[2] = dataclasses.replace(layouts[2], own_heads=None)
    with contextlib.ExitStack() as stack:
        reader, *sources = (stack.enter_context(transfer.Endpoint(name, secret=SECRET)) for name in "rabc")
        offers = []
        for source, layout in zip(sources, layouts, strict=True):
            pool = transfer.PagePool(source, layout, 12)
            pages = pool.allocate(-(-21 // layout.page_tokens))
            write(pool, pages, 21)
            offers.append(transfer.offer(pool, pages, tokens=21, streamed=True))
        pool = transfer.PagePool(reader, LAYOUT, 8)
        pages = pool.allocate(6)
        pull = transfer.pull(pool, [offer.ticket for offer in offers], pages)
        sources[1].close()
        for layer in range(3):
            offers[0].mark_ready(layer)
            offers[2].mark_ready(layer)
        pull.wait(timeout_s=LIMIT_S)
        check(pool, pages, 0, 21)


@pytest.mark.parametrize("error", [transfer.PeerLost, transfer.TransferTimeout])
def test_the_error_of_a_pull_names_the_source_that_failed_last(error):
    with (
        pool_of() as (_, pool, pages),
        transfer.Endpoint("first", secret=SECRET) as first,
        transfer.Endpoint("second", secret=SECRET) as second,
    ):
        offers = [large_offer(source, streamed=True) for source in (first, second)]
        pull = transfer.pull(pool, [offer.ticket for offer in offers], pages)
        first.close()
        wait_until(lambda: second.stats()["reads_served"] == LARGE.layers, LIMIT_S)
        if error is transfer.PeerLost:
            second.close()
        with pytest.raises(error, match="a ticket of endpoint 'second'"):
            pull.wait(1, timeout_s=LIMIT_S if error is transfer.PeerLost else 0.1)


def test_a_source_of_pages_that_is_lost_before_the_pull():
    with pool_of() as (_, pool, pages), transfer.Endpoint("second", secret=SECRET) as second:
        with transfer.Endpoint("first", secret=SECRET) as first:
            lost = large_offer(first).ticket
        with pytest.raises(transfer.PeerLost, match=r"a ticket of endpoint 'first' .*cannot connect"):
            transfer.pull(pool, lost, pages)
        transfer.pull(pool, [lost, large_offer(second).ticket], pages).wait(timeout_s=LIMIT_S)
        check_layer(pool, pages, 1)
