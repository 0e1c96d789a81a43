"""The contract of failures (docs/guide/transfer.md), with real processes.

Calls have limits of LIMIT_S or of the default lease, so an error of another kind than a limit has not waited for them.
"""

import concurrent.futures
import contextlib
import gc
import math
import os
import re
import select
import signal
import socket
import threading
import weakref

import numpy as np
import pytest
from jobs import LAYOUT, LIMIT_S, SECRET, Calls, Link, decode, job, source_job
from test_weights import wait_until

import jaxcomm
from jaxcomm import transfer
from jaxcomm.transfer._endpoint import Limit


@pytest.fixture
def reader():
    with transfer.Endpoint("reader", secret=SECRET, shared_memory=False) as endpoint:
        yield endpoint


def fetch(reader, address, timeout_s=LIMIT_S, version="latest"):
    return transfer.fetch(reader, transfer.Group(address), "weights", version, None, timeout_s=timeout_s)


def test_a_source_that_is_killed_stopped_or_restarted(reader):
    with source_job() as (source, address):
        assert fetch(reader, address).result()["['w']"].sum() == 1000
        source.stop()
        with pytest.raises(TimeoutError, match=r"'weights' of endpoint 'trainer' .*within 0\.5 s") as error:
            fetch(reader, address, timeout_s=0.5).result()
        assert isinstance(error.value, transfer.TransferTimeout)
        source.go_on()
        assert fetch(reader, address).result()["['w']"].sum() == 1000, "it was late, not dead"
        source.kill()
        with pytest.raises(transfer.PeerLost, match=r"endpoint 'trainer' \(incarnation .*cannot connect"):
            fetch(reader, address).result()
        listen = address.split("/")[2]
        with source_job(listen, version=2) as (_, new):
            with pytest.raises(transfer.PeerLost, match="it has been restarted: ask for its new address"):
                fetch(reader, address).result()
            assert fetch(reader, new).result()["['w']"].sum() == 2000
    assert reader.stats()["failures_timeout"] == 1


def test_a_source_that_is_killed_while_it_sends(reader):
    """Another transfer of the reader goes on, and its old version stays."""
    with (
        source_job(elements=25_000_000) as (source, address),
        contextlib.closing(Link(address, 2**21)) as link,
        source_job(version=3) as (_, other),
    ):
        old = fetch(reader, other).result()
        future = fetch(reader, link.address)
        wait_until(lambda: link.is_cut() and reader.stats()["tcp_received_bytes"] > 2**20, LIMIT_S)
        assert re.match(r"read of 'weights' version 1 at endpoint 'trainer' .*of 100000000 bytes", reader.waiting()[0])
        source.kill()
        link.mend()
        with pytest.raises(transfer.PeerLost, match=r"version 1 of endpoint 'trainer'.*\(\d+ of 100000000 bytes"):
            future.result(LIMIT_S / 2)
        assert old["['w']"].sum() == fetch(reader, other).result()["['w']"].sum() == 3000


@contextlib.contextmanager
def offered(shared_memory, limits=None):
    """A pool whose offer a reader can pull one layer of."""
    with transfer.Endpoint("prefill", secret=SECRET, shared_memory=shared_memory, limits=limits) as endpoint:
        pool = transfer.PagePool(endpoint, LAYOUT, 4)
        pages = pool.allocate(1)
        for array in pool.arrays:
            array[pages] = 1
        offer = transfer.offer(pool, pages, streamed=True)
        offer.mark_ready(0)
        yield endpoint, pool, pages, offer


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared_memory", "tcp"])
def test_a_reader_of_pages_that_is_killed(shared_memory):
    """Its lease of 600 s ends with the connection."""
    with offered(shared_memory) as (endpoint, pool, pages, offer), job(decode, shared_memory, 600.0) as reader:
        reader.send(offer.ticket)
        assert reader.receive() == "layer 0" and not offer.done
        reader.kill()
        wait_until(lambda: offer.done, LIMIT_S)
        pool.free(pages)
        assert endpoint.stats()["leases"] == endpoint.stats()["leases_expired"] == 0


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared_memory", "tcp"])
def test_a_reader_of_pages_that_is_stopped(shared_memory):
    """Its lease expires, and the pages get other content. Later it gets an error, never this content.

    It asks for a longer lease than the source grants.
    """
    limits = transfer.Limits(lease_s=600.0, max_lease_s=4.0)  # a slow machine must not let it expire before
    with offered(shared_memory, limits) as (endpoint, pool, pages, offer), job(decode, shared_memory, 600.0) as reader:
        reader.send(offer.ticket)
        assert reader.receive() == "layer 0"
        reader.stop()
        wait_until(lambda: offer.done, LIMIT_S)
        pool.free(pages)
        assert endpoint.stats()["leases_expired"] == 1
        pool.arrays[1][pages] = 2
        offer.mark_ready(1)
        reader.go_on()
        kind, text = reader.receive()
        assert kind == "Revoked" and "a ticket of endpoint 'prefill'" in text


class Interrupted(Calls):
    """Its waits end as by Ctrl-C."""

    def wait(self, *_):
        raise KeyboardInterrupt

    poll = wait


@pytest.mark.parametrize("elements", [10, 100_000], ids=["on the caller's thread", "on a thread of the pool"])
def test_an_interrupt_while_a_planned_fetch_opens(reader, elements):
    """Nothing is written to its arrays any more, and its lease ends, although the answer comes later."""
    with (
        transfer.Endpoint("source", secret=SECRET, shared_memory=False) as source,
        contextlib.closing(Link(source.address)) as link,
    ):
        transfer.publish(source, "weights", np.ones(elements), 1)
        assert fetch(reader, link.address).result()[""].sum() == elements
        link.cut()
        native, reader._native = reader._native, Interrupted(reader._native)
        with pytest.raises(KeyboardInterrupt):
            fetch(reader, link.address).result()
        reader._native = native
        assert not reader.waiting()
        link.mend()
        wait_until(lambda: source.stats()["leases_granted"] == 2 and source.stats()["leases"] == 0, LIMIT_S)


def test_only_an_old_connection_is_tried_again(reader):
    """Within the limit of the fetch."""
    with (
        transfer.Endpoint("source", secret=SECRET, shared_memory=False) as source,
        contextlib.closing(Link(source.address)) as link,
    ):
        transfer.publish(source, "weights", np.ones(10), 1)
        with pytest.raises(transfer.VersionGone):
            fetch(reader, link.address, version=0).result()
        link.end_connections()
        reader._native = Calls(reader._native)
        assert fetch(reader, link.address).result()[""].sum() == 10
        first_s, again_s = reader._native.of("wait")[:2]
        assert again_s < first_s <= LIMIT_S
        source.close()
        link.end_connections()
        for waits in (2, 1):
            reader._native.made.clear()
            with pytest.raises(transfer.PeerLost):
                fetch(reader, link.address).result()
            assert len(reader._native.of("wait")) == waits


def test_a_ticket_whose_answer_is_lost(reader):
    """On an old connection, which is tried again: the source has taken the ticket, and the reader is not at fault."""
    with offered(False) as (source, _, _, offer), contextlib.closing(Link(source.address)) as link:
        transfer.publish(source, "weights", np.ones(9), 1)
        assert fetch(reader, link.address).result()[""].sum() == 9
        link.hold_answers()
        own = transfer.PagePool(reader, LAYOUT, 4)
        ticket = f"{link.address}#{offer.ticket.partition('#')[2]}"
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            pull = thread.submit(transfer.pull, own, ticket, own.allocate(1))
            wait_until(lambda: source.stats()["leases_granted"] == 2, LIMIT_S)
            link.end_connections()
            with pytest.raises(transfer.PeerLost, match=r"'prefill' .*the connection ended.*has taken the ticket"):
                pull.result()
        wait_until(lambda: offer.done, LIMIT_S)


@contextlib.contextmanager
def silent_addresses(names):
    """Nobody answers there: the queue of connections is full, so the kernel drops more."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        where = listener.getsockname()
        stack.enter_context(socket.create_connection(where))
        yield [f"tcp://127.0.0.1:{where[1]}/{name}/{'0' * 16}/" for name in names]


@pytest.mark.parametrize("planned", [False, True])
def test_hosts_that_do_not_answer_cost_one_time_limit(reader, planned):
    """All are asked at once, and each is asked once."""
    with transfer.Endpoint("source", secret=SECRET) as source, silent_addresses(["a", "b"]) as silent:
        transfer.publish(source, "weights", np.ones(9), 1)
        if planned:
            fetch(reader, source.address).result()
            ((_, *key), plan) = reader._plans.popitem()
            group = transfer.Group([source.address, *silent])
            plan.digests, plan.reads = plan.digests * 3, [*plan.reads, [], []]
            reader._plans[group, *key] = plan
            reader._native.disconnect(reader._peers.popitem()[1])
        else:
            with pytest.raises(transfer.PeerLost, match=r"fetch: 'weights' of endpoint 'a' .*it does not answer"):
                fetch(reader, silent[0]).result()
        reader._native = Calls(reader._native)
        group = transfer.Group([source.address, *silent])
        assert transfer.fetch(reader, group, "weights", "latest", None, timeout_s=LIMIT_S).result()[""].sum() == 9
        kinds = [kind for kind, _ in reader._native.made]
        assert kinds[: kinds.index("wait")] == ["connect"] * 3 == [kind for kind in kinds if kind == "connect"]


def test_the_limit_of_a_call_is_that_of_all_its_waits(reader, monkeypatch):
    """Its error shows the limit, not what is left of it. A signal, as that of Ctrl-C, ends a wait."""
    with offered(False) as (source, pool, _, offer):
        tickets = [offer.ticket, transfer.offer(pool, pool.allocate(1)).ticket]
        own = transfer.PagePool(reader, LAYOUT, 4)
        limits, wait = [], reader._wait

        def recorded(call, limit, *rest):
            limits.append(limit)
            wait(call, limit, *rest)

        monkeypatch.setattr(reader, "_wait", recorded)
        pull = transfer.pull(own, tickets, own.allocate(1), timeout_s=LIMIT_S)
        assert len(limits) == 2 and limits[0] is limits[1] and limits[0].timeout_s == LIMIT_S
        versions = transfer.watch(reader, transfer.Group([source.address] * 2), "weights", timeout_s=LIMIT_S)
        for version in (1, 2):
            transfer.publish(source, "weights", np.ones(1), version)
            assert next(versions) == version
        assert limits[2] is limits[3] is not limits[4] is limits[5], "each version has a limit of its own"
        ((lease, read),) = pull._reads[1]
        default = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            lease.wait(read, Limit(LIMIT_S))
        signal.signal(signal.SIGUSR1, default)
        assert not read.done
        late = Limit(LIMIT_S)
        late._ends -= LIMIT_S
        with pytest.raises(transfer.TransferTimeout, match=rf"within {LIMIT_S} s \(timeout_s\)"):
            lease.wait(read, late)


@pytest.mark.parametrize("ends", ["cancelled", "no thread", "late"])
def test_a_small_planned_fetch_that_no_thread_takes(monkeypatch, ends):
    """Its memory may be freed, so nothing is written there when the answer comes."""
    with (
        transfer.Endpoint("reader", secret=SECRET, limits=transfer.Limits(transfers=1)) as reader,
        transfer.Endpoint("source", secret=SECRET, shared_memory=False) as source,
        contextlib.closing(Link(source.address)) as link,
    ):
        transfer.publish(source, "weights", np.ones(10), 1)
        assert fetch(reader, link.address).result()[""].sum() == 10
        transfer.publish(source, "weights", np.ones(20), 2)  # whose lease the answer would not end
        busy = threading.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(busy.set)
            reader._submit(busy.wait, Limit(LIMIT_S), TimeoutError)
            link.cut()
            if ends == "cancelled":
                future = fetch(reader, link.address)
                assert [call.split(" ")[0] for call in reader.waiting()] == ["open", "read"]
                assert future.cancel()
            elif ends == "late":
                error = fetch(reader, link.address, timeout_s=0.2).exception(LIMIT_S)
                assert isinstance(error, transfer.TransferTimeout) and not busy.is_set()
                assert re.search(r"'weights' of endpoint 'source' .* 0.2 s .* 1 \(Limits.transfers\)", str(error))
            else:
                monkeypatch.setattr(reader._threads, "submit", None)
                with pytest.raises(TypeError):
                    fetch(reader, link.address)
                monkeypatch.undo()
            assert not reader.waiting()
            link.mend()
            wait_until(lambda: source.stats()["leases_granted"] == 2 and source.stats()["leases"] == 0, LIMIT_S)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_large_planned_fetch_begins_on_the_callers_thread_if_another_one_is_free(monkeypatch, is_busy):
    with (
        transfer.Endpoint("reader", secret=SECRET, limits=transfer.Limits(transfers=1)) as reader,
        transfer.Endpoint("source", secret=SECRET) as source,
    ):
        want = np.arange(1 << 15)
        transfer.publish(source, "weights", want, 1)
        fetch(reader, source.address).result()
        wait_until(lambda: not reader._num_submitted)  # its thread is free
        threads = []
        begin = reader._begin_open
        monkeypatch.setattr(reader, "_begin_open", lambda x: threads.append(threading.current_thread()) or begin(x))
        busy = threading.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(busy.set)
            if is_busy:
                reader._submit(busy.wait, Limit(LIMIT_S), TimeoutError)
            future = fetch(reader, source.address)
            assert threads == [] if is_busy else threads[0] is threading.current_thread()
        np.testing.assert_array_equal(future.result()[""], want)
        assert len(threads) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_transfer_that_has_waited_for_a_thread_frees_its_memory(fails):
    """Without the garbage collector, which may not come for long."""
    made = []

    def run():
        array = np.zeros(1)
        made.append(weakref.ref(array))
        return {False: array}[fails]

    gc.disable()
    try:
        with transfer.Endpoint("reader", secret=SECRET, limits=transfer.Limits(transfers=1)) as endpoint:
            busy = threading.Event()
            first = endpoint._submit(busy.wait, Limit(LIMIT_S), TimeoutError)
            second = endpoint._submit(run, Limit(math.inf), TimeoutError)
            busy.set()
            assert first.result() and isinstance(second.exception(), KeyError if fails else type(None))
            del second
            wait_until(lambda: made[0]() is None)
    finally:
        gc.enable()


def test_another_secret_and_nobody(reader):
    with transfer.Endpoint("other", secret="not the same secret") as other:
        with pytest.raises(transfer.PeerLost, match=r"endpoint 'other' .*its secret is another one"):
            fetch(reader, other.address).result()
        address = other.address
    with pytest.raises(transfer.PeerLost, match="cannot connect"):
        fetch(reader, address).result()
    wrong = "", "127.0.0.1:80", "tcp://127.0.0.1:80/x", "tcp://host:1/x/0123456789abcdef/"
    for text in (*wrong, "tcp://127.0.0.1:65537/x/0123456789abcdef/", "tcp://0.0.0.0:1/x/0123456789abcdef/"):
        with pytest.raises(ValueError, match=r"no address|must have a port|must name one"):
            fetch(reader, text).result()
    for addresses in ([], [b"tcp://127.0.0.1:80/x"]):
        with pytest.raises(ValueError, match=r"must be at least one Endpoint\.address"):
            transfer.Group(addresses)


def loopback():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return "[::1]:0"  # if this machine has IPv6


@pytest.mark.parametrize("planned", [False, True])
def test_a_closed_endpoint_does_nothing_in_silence(reader, planned):
    with transfer.Endpoint("source", secret=SECRET, listen=loopback()) as source:
        transfer.publish(source, "weights", np.zeros(4), 1)
        pool = transfer.PagePool(source, LAYOUT, 4)
        pages, here = pool.allocate(1), transfer.PagePool(reader, LAYOUT, 4)
        ticket = transfer.offer(pool, pages).ticket
        if planned:
            fetch(reader, source.address).result()
        reader.close()
        assert not reader._plans and "reader" not in {each.endpoint for each in jaxcomm.recorder.stats().transfers}
        future, closed = fetch(reader, source.address), pytest.raises(transfer.Cancelled, match="'reader' was closed")
        with closed:
            future.result(LIMIT_S)
        with closed:
            next(transfer.watch(reader, transfer.Group(source.address), "weights"))
        with closed:
            transfer.pull(here, ticket, here.allocate(1))
    with pytest.raises(transfer.Cancelled, match=r"publish: 'weights' .*'source' was closed"):
        transfer.publish(source, "weights", np.zeros(4), 2)
    with pytest.raises(transfer.Cancelled, match=r"offer .*'source' was closed"):
        transfer.offer(pool, pages)
    assert not source._kept


def test_the_oldest_strangers_make_room():
    with contextlib.ExitStack() as stack:
        limits = transfer.Limits(connections=2)
        source = stack.enter_context(transfer.Endpoint("source", secret=SECRET, limits=limits))
        host, port = source.address.split("/")[2].split(":")
        strangers = []
        for _ in range(4):
            strangers.append(stack.enter_context(socket.create_connection((host, port), LIMIT_S)))
            assert strangers[-1].recv(48, socket.MSG_WAITALL)[:8] == b"jaxcommT"
        assert source.stats()["rejected_connections"] >= 2  # more on a slow machine: each may stay for 2 s
        for oldest in strangers[:2]:
            assert oldest in select.select(strangers, [], [], LIMIT_S)[0]
            strangers.remove(oldest)
