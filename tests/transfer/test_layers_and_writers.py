"""Layers that are waited for one by one, heads of tensor-parallel ranks, several writers and readers of an object."""

import concurrent.futures
import contextlib

import numpy as np
import pytest
from test_weights import SECRET, wait_until

from jaxcomm import transfer

LAYOUT = transfer.PageLayout(layers=3, heads=4, dim=8, dtype=np.int32, page_tokens=4)


def test_the_last_layer_ends_the_lease():
    """The source has its pages back long before the lease of 30 s ends."""
    source, reader = (transfer.Endpoint(name, secret=SECRET) for name in ("prefill", "decode"))
    with source, reader:
        there, here = (transfer.PagePool(endpoint, LAYOUT, 4) for endpoint in (source, reader))
        pages = there.allocate(2)
        offer = transfer.offer(there, pages)
        pull = transfer.pull(here, offer.ticket, here.allocate(2))
        for layer in range(LAYOUT.layers):
            pull.wait(layer)
        wait_until(lambda: offer.done)
        there.free(pages)


def test_ranks_have_heads_in_order():
    """Of 8 ranks for 4 heads, neighbours have the same one."""
    assert [LAYOUT.of_rank(rank, 2).own_heads for rank in range(2)] == [(0, 2), (2, 4)]
    assert [LAYOUT.of_rank(rank, 8).own_heads for rank in range(8)] == [(i, i + 1) for i in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_tickets_of_ranks_have_the_same_tokens():
    """In any order: the rest of a page would be read from one of them only."""
    source, reader = (transfer.Endpoint(name, secret=SECRET) for name in ("prefill", "decode"))
    with source, reader:
        ranks = [transfer.PagePool(source, LAYOUT.of_rank(rank, 2), 8) for rank in range(2)]
        here = transfer.PagePool(reader, LAYOUT, 4)
        for tokens in ((8, 7), (7, 8)):
            offers = [transfer.offer(p, p.allocate(2), tokens=n) for p, n in zip(ranks, tokens, strict=True)]
            with pytest.raises(transfer.Refused, match="other numbers of tokens"):
                transfer.pull(here, [offer.ticket for offer in offers], here.allocate(2))


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


def test_a_reader_that_no_longer_watches_ends_no_other_watch():
    """Both readers give their watches the same number."""
    writer, first, second = (transfer.Endpoint(name, secret=SECRET) for name in ("writer", "first", "second"))
    with writer, first, second, concurrent.futures.ThreadPoolExecutor(1) as thread:
        group = transfer.Group(writer.address)
        found = thread.submit(next, transfer.watch(first, group, "x", timeout_s=60))
        with pytest.raises(transfer.TransferTimeout):
            next(transfer.watch(second, group, "x", timeout_s=0.5))
        transfer.publish(writer, "x", {"w": np.zeros(3)}, 4)
        assert found.result() == 4


def test_a_fetch_that_was_given_up_leaves_no_lease():
    """The answer comes when nobody waits for it, except if the writer is faster than the reader's thread."""
    writer, reader = (transfer.Endpoint(name, secret=SECRET) for name in ("writer", "reader"))
    with writer, reader:
        transfer.publish(writer, "x", {"w": np.zeros(3)}, 1)
        with contextlib.suppress(transfer.TransferTimeout):
            transfer.fetch(reader, transfer.Group(writer.address), "x", 1, None, timeout_s=1e-9).result()
        wait_until(lambda: writer.stats()["leases_granted"] == 1 and writer.stats()["leases"] == 0)
