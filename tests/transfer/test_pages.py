"""offer() and pull() of cache pages. Each element has a code of its layer, kv, token, head and dim."""

import concurrent.futures
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_weights import wait_until

from jaxcomm import transfer

SECRET = "a secret of tests only"
LAYOUT = transfer.PageLayout(layers=3, heads=4, dim=8, dtype=np.int32, page_tokens=4)
CANONICAL = ("kv", "page", "token", "head", "dim")
HND = ("page", "head", "kv", "token", "dim")  # unlike its inverse


@pytest.fixture(params=[True, False], ids=["shared_memory", "tcp"])
def pair(request):
    names = ("prefill", "decode")
    source, reader = (transfer.Endpoint(n, secret=SECRET, shared_memory=request.param) for n in names)
    with source, reader:
        yield source, reader


def code(layout, layer, tokens):
    """(kv, token, head, dim) of a layer: the content of the whole model's cache."""
    kv, token, head, dim = np.ogrid[: layout.kv, :tokens, : layout.heads, : layout.dim]
    return layer * 10**7 + kv * 10**6 + token * 10**3 + head * 10 + dim


def canonical(pool, layer):
    """A view of a layer as (kv, page, token, head, dim)."""
    order = [pool.layout.order.index(name) for name in CANONICAL]
    return pool.arrays[layer].transpose(order)


def write(pool, pages, tokens, salt=0):
    begin, end = pool.layout.head_range
    for layer in range(pool.layout.layers):
        data = code(pool.layout, layer, tokens)[:, :, begin:end] + salt
        for token in range(tokens):
            page, within = divmod(token, pool.layout.page_tokens)
            canonical(pool, layer)[:, pages[page], within] = data[:, token]


def check(pool, pages, skip, tokens, layers=None, salt=0):
    """The tokens, and zeros in the rest of the last page."""
    begin, end = pool.layout.head_range
    for layer in layers if layers is not None else range(pool.layout.layers):
        want = code(pool.layout, layer, tokens)[:, skip:, begin:end] + salt
        got = canonical(pool, layer)[:, pages]
        got = got.reshape(got.shape[0], -1, *got.shape[3:])
        np.testing.assert_array_equal(got[:, : tokens - skip].astype(np.int64), want)
        assert not got[:, tokens - skip :].any()


def scattered(pool, count):
    """Pages in no order, all others filled with -1."""
    for array in pool.arrays:
        array[...] = -1
    pages = pool.allocate(2 * count)
    keep = pages[::2][::-1]
    pool.free([page for page in pages if page not in keep])
    return keep


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (4, 1), (2, 8), (8, 2), (8, 8)], ids=str)
@pytest.mark.parametrize(
    "page_tokens, order, skip", [(4, LAYOUT.order, 0), (6, HND, 6), (2, HND, 4), (16, LAYOUT.order, 0)]
)
def test_any_ranks_page_size_and_order(pair, ranks, page_tokens, order, skip):
    """Also with more ranks than heads, so that several have the same."""
    tokens = 21
    sources = [transfer.PagePool(pair[0], LAYOUT.of_rank(rank, ranks[0]), 16) for rank in range(ranks[0])]
    own = transfer.PageLayout(3, 4, 8, np.int32, page_tokens=page_tokens, order=order)
    for rank in range(ranks[1]):
        tickets = []
        for pool in sources:
            pages = pool.allocate(6)
            write(pool, pages, tokens)
            tickets.append(transfer.offer(pool, pages, tokens=tokens).ticket)
        pool = transfer.PagePool(pair[1], own.of_rank(rank, ranks[1]), 32)
        pages = scattered(pool, -(-(tokens - skip) // page_tokens))
        before = sum(n for name, n in pair[1].stats().items() if name.endswith("received_bytes"))
        pull = transfer.pull(pool, tickets, pages, skip_tokens=skip)
        pull.wait()
        check(pool, pages, skip, tokens)
        received = sum(n for name, n in pair[1].stats().items() if name.endswith("received_bytes")) - before
        begin, end = pool.layout.head_range
        assert received == 3 * 2 * (tokens - skip) * (end - begin) * 8 * 4, "each byte once, and no prefix"
        others = [p for p in range(32) if p not in pages]
        assert all((canonical(pool, layer)[:, others] == -1).all() for layer in range(3))
        for pool in sources:
            wait_until(lambda pool=pool: all(u.done for users in pool._users.values() for u in users))
            pool.free(list(pool._users))
            assert pool.num_free == 16


def test_layers_arrive_as_they_are_ready(pair):
    source, reader = (transfer.PagePool(endpoint, LAYOUT, 8) for endpoint in pair)
    pages, own, (late,) = source.allocate(2), reader.allocate(2), source.allocate(1)
    pulls = [transfer.pull(reader, transfer.offer(source, [late], streamed=True).ticket, reader.allocate(1))]
    offer = transfer.offer(source, pages, streamed=True)
    pull = transfer.pull(reader, offer.ticket, own)
    write(source, pages, 8)
    time.sleep(0.05)
    for layer in (1, 0):
        assert not pull.is_ready(layer)
        offer.mark_ready(layer)
        pull.wait(layer)
        check(reader, own, 0, 8, [layer])
    assert not pull.done and not offer.done
    offer.mark_ready(2)
    pull.wait(2)  # ends the lease, of 30 s
    wait_until(lambda: offer.done)
    assert pair[1].stats()["read_wait_us"] >= 3 * 50_000 and not pulls[0].is_ready(0)
    source.free(pages)
    reader.free(own)
    with pytest.raises(ValueError, match="Offer: layer must be an integer from 0 to 2, got 3"):
        offer.mark_ready(3)


def test_pages_with_several_users_stay_until_all_have_ended(pair):
    """Pages in two offers, the later of which ends first, and pages that are offered while they arrive."""
    source, reader = (transfer.PagePool(endpoint, LAYOUT, 8) for endpoint in pair)
    pages, own = source.allocate(2), reader.allocate(2)
    write(source, pages, 8)
    first, *later = (transfer.offer(source, pages, streamed=True) for _ in range(3))
    pull = transfer.pull(reader, first.ticket, own)
    later.append(transfer.offer(reader, own, streamed=True))
    for each in later:
        each.revoke()
        wait_until(lambda each=each: each.done)
    for pool, used, user in ((source, pages, "an offer of 2 cache pages"), (reader, own, "a pull")):
        with pytest.raises(ValueError, match=f"in {user}, which has not ended"):
            pool.free(pool.allocate(1) + used)
        assert pool.num_free == 5, "nothing is freed before an error"
    for layer in range(3):
        first.mark_ready(layer)
    pull.wait()
    check(reader, own, 0, 8)
    wait_until(lambda: first.done)
    source.free(pages)
    reader.free(own)
    assert source.num_free == reader.num_free == 7


@pytest.mark.parametrize("end", ["revoke", "cancel", "both", "close reader", "close source"])
def test_a_pull_that_ends_early_frees_the_pages_of_both(pair, end):
    source, reader = (transfer.PagePool(endpoint, LAYOUT, 8) for endpoint in pair)
    pages, own = source.allocate(2), reader.allocate(2)
    offer = transfer.offer(source, pages, streamed=True)
    pull = transfer.pull(reader, offer.ticket, own)
    acts = {"revoke": [offer.revoke] * 2, "cancel": [pull.cancel] * 2, "both": [offer.revoke, pull.cancel] * 4}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda act: act(), acts.get(end) or [pair[end == "close reader"].close]))
    errors = {
        "revoke": transfer.Revoked,
        "close source": transfer.PeerLost,
        "both": (transfer.Cancelled, transfer.Revoked),
    }
    error = errors.get(end, transfer.Cancelled)
    with pytest.raises(error, match="pull: a ticket of endpoint 'prefill'"):
        pull.wait()
    wait_until(lambda: offer.done)
    assert end != "revoke" or pair[0].stats()["leases_revoked"] == 1
    source.free(pages)
    reader.free(own)
    assert source.num_free == reader.num_free == 8


def test_tickets_are_for_one_pull(pair):
    source, reader = (transfer.PagePool(endpoint, LAYOUT, 8) for endpoint in pair)
    pages = source.allocate(1)
    write(source, pages, 4)
    offer = transfer.offer(source, pages, streamed=True)
    transfer.pull(reader, offer.ticket, reader.allocate(1))
    with pytest.raises(transfer.VersionGone, match="used before"):
        transfer.pull(reader, offer.ticket, reader.allocate(1))
    other = transfer.offer(source, pages, reader="somebody", streamed=True)
    with pytest.raises(transfer.Refused, match="the ticket is for 'somebody'"):
        transfer.pull(reader, other.ticket, reader.allocate(1))
    with transfer.Endpoint("somebody", secret=SECRET) as endpoint:
        own = transfer.PagePool(endpoint, LAYOUT, 8)
        pull = transfer.pull(own, other.ticket, own.allocate(1))
        wait_until(lambda: pair[0].stats()["reads_served"] == 2 * LAYOUT.layers)
        other.revoke()
        with pytest.raises(transfer.Revoked, match="the source took it back"):
            pull.wait()
    forever, late = (transfer.offer(source, pages, lease_s=lease_s) for lease_s in (1e10, 0.05))
    wait_until(lambda: late.done)
    assert not forever.done and pair[0].stats()["leases_expired"] == 1
    with pytest.raises(transfer.NotFound):
        transfer.pull(reader, late.ticket, reader.allocate(1))
    with pytest.raises(transfer.NotFound):
        transfer.pull(reader, offer.ticket[:-32] + "00" * 16, reader.allocate(1))


def test_bad_input(pair):
    source, reader = (transfer.PagePool(endpoint, LAYOUT, 8) for endpoint in pair)
    pages = source.allocate(3)
    for wrong, tokens in (([8], None), ([-1], None), ([pages[0]] * 2, None), (pages, 13), (pages, 8), ([7], None),
                          (pages, 9.5), (pages, True), (pages, -4)):  # fmt: skip
        with pytest.raises(ValueError, match=r"PagePool|offer"):
            transfer.offer(source, wrong, tokens=tokens)
    for lease_s in (math.nan, 0, -1.0, "3"):
        with pytest.raises(ValueError, match=r"offer: lease_s must be a number between 0\.001"):
            transfer.offer(source, pages, lease_s=lease_s)
    for call in (source.free, functools.partial(transfer.offer, source)):
        with pytest.raises(TypeError, match="a cache page must be an integer"):
            call([0.5])
    for count in (-1, 1.0, True):
        with pytest.raises(ValueError, match="PagePool: count must be an integer of at least 0"):
            source.allocate(count)
    with pytest.raises(ValueError, match="PagePool: num_pages must be an integer of at least 0"):
        transfer.PagePool(pair[0], LAYOUT, -1)
    with pytest.raises(MemoryError, match="6 cache pages wanted, 5 of 8 are free"):
        source.allocate(6)
    assert source.num_free == 5
    offer = transfer.offer(source, pages)
    with pytest.raises(ValueError, match="3 pages are needed"):
        transfer.pull(reader, offer.ticket, reader.allocate(2))
    wait_until(lambda: offer.done)
    pull = transfer.pull(reader, transfer.offer(source, pages).ticket, own := reader.allocate(3))
    for layer in (-1, 3, 0.5):
        for call in (pull.wait, pull.is_ready):
            with pytest.raises(ValueError, match="Pull: layer must be an integer from 0 to 2"):
                call(layer)
    pull.wait()
    reader.free(own)
    for skip in (-4, 3, 4.0):
        with pytest.raises(ValueError, match="pull: skip_tokens must be"):
            transfer.pull(reader, "", [], skip_tokens=skip)
    transfer.pull(reader, transfer.offer(source, pages).ticket, [], skip_tokens=16).wait()  # more than there are
    with pytest.raises(ValueError, match="there are no tickets"):
        transfer.pull(reader, [], reader.allocate(1))
    for own in (dict(dim=16), dict(layers=2), dict(dtype=np.int64), dict(kv=1), dict(heads=2)):
        values = {"layers": 3, "heads": 4, "dim": 8, "dtype": np.int32, "page_tokens": 4, **own}
        pool = transfer.PagePool(pair[1], transfer.PageLayout(**values), 8)
        with pytest.raises(transfer.Refused, match="the source has"):
            transfer.pull(pool, transfer.offer(source, pages).ticket, pool.allocate(3))
    halves = half, _ = [transfer.PagePool(pair[0], LAYOUT.of_rank(rank, 2), 8) for rank in range(2)]
    for counts in ((8, 7), (7, 8)):  # in any order: the rest of a page would be read from one of them only
        tickets = [transfer.offer(p, p.allocate(2), tokens=n).ticket for p, n in zip(halves, counts, strict=True)]
        with pytest.raises(transfer.Refused, match="other numbers of tokens"):
            transfer.pull(reader, tickets, reader.allocate(2))
    with pytest.raises(transfer.Refused, match=r"heads \[0, 4\) are not in the tickets, which have \[\(0, 2\)\]"):
        transfer.pull(reader, transfer.offer(half, half.allocate(1)).ticket, reader.allocate(1))
    with pytest.raises(ValueError, match="cannot be split"):
        LAYOUT.of_rank(0, 3)
    for size, width in ((2, 2), (8, 1)):  # of 8 ranks for 4 heads, neighbours have the same one
        begins = [rank * 4 // size for rank in range(size)]
        assert [LAYOUT.of_rank(rank, size).own_heads for rank in range(size)] == [(i, i + width) for i in begins]
    for wrong in (dict(order=("page",)), dict(layers=0), dict(heads=2.0), dict(kv=True), dict(own_heads=(1, 1)),
                  dict(own_heads=(0, 2)), dict(own_heads=(-1, 1)), dict(dim=0), dict(page_tokens=0)):  # fmt: skip
        with pytest.raises(ValueError, match=r"PageLayout: .* must"):
            transfer.PageLayout(**{"layers": 1, "heads": 1, "dim": 1, "dtype": np.int8, **wrong})


@pytest.mark.parametrize(("order", "dtype"), [(LAYOUT.order, np.int32), (HND, np.int16)])
def test_programs_emit_and_insert_layer_by_layer(pair, order, dtype):
    """The decoding program waits on a device of its own: programs of one device run one after the other."""
    layout = transfer.PageLayout(3, 4, 8, dtype, page_tokens=4, order=order)
    source, reader = (transfer.PagePool(endpoint, layout, 8) for endpoint in pair)
    filled = transfer.PagePool(pair[0], layout, 8)
    write(filled, range(8), 32)
    offer = transfer.offer(source, source.allocate(2), streamed=True)
    pull = transfer.pull(reader, offer.ticket, reader.allocate(2))

    @jax.jit
    def prefill(cache, handle, pages):
        def layer(_, xs):
            return 0, transfer.emit(xs[1], handle, pages, xs[0], layout=layout)

        return jax.lax.scan(layer, 0, (jnp.arange(3), cache))[1]

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache, handle, pages):
        limits_s = (math.inf, 1e10, 60)
        return [transfer.insert(x, handle, pages, i, layout=layout, timeout_s=limits_s[i]) for i, x in enumerate(cache)]

    empty = [jax.device_put(jnp.full(layout.shape(16), -1, dtype), jax.devices()[1]) for _ in range(3)]
    addresses = [x.unsafe_buffer_pointer() for x in empty]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        running = thread.submit(decode, empty, np.int32(pull.handle), np.array([9, 2]))
        prefill(jnp.stack(filled.arrays), np.int32(offer.handle), np.array([5, 1]))
        arrived = running.result()
    assert [x.unsafe_buffer_pointer() for x in arrived] == addresses
    for layer in range(3):
        got = np.asarray(arrived[layer]).transpose([order.index(name) for name in CANONICAL])
        np.testing.assert_array_equal(got[:, [9, 2]], canonical(filled, layer)[:, [5, 1]])
        assert (np.delete(got, [9, 2], 1) == -1).all()
    pull.wait()
    wait_until(lambda: offer.done)
    jax.block_until_ready(prefill(jnp.stack(filled.arrays), np.int32(offer.handle), np.array([6, 2])))  # too late
    np.testing.assert_array_equal(canonical(source, 0)[:, offer._pages], canonical(filled, 0)[:, [5, 1]])


@pytest.mark.parametrize("failed", [0, 1, None])
def test_insert_fails_if_one_of_two_sources_does(pair, failed):
    """Each has half of the heads. The reads have ended before, so insert() sees them in the order of the tickets."""
    with transfer.Endpoint("prefill-1", secret=SECRET) as second:
        offers = []
        for rank, endpoint in enumerate((pair[0], second)):
            source = transfer.PagePool(endpoint, LAYOUT.of_rank(rank, 2), 2)
            pages = source.allocate(2)
            write(source, pages, 8)
            offers.append(transfer.offer(source, pages, streamed=True))
        pool = transfer.PagePool(pair[1], LAYOUT, 2)
        pull = transfer.pull(pool, [offer.ticket for offer in offers], pool.allocate(2))
        for rank, offer in enumerate(offers):
            if rank == failed:
                offer.revoke()
            else:
                offer.mark_ready(0)
        wait_until(lambda: pull.is_ready(0))
        arguments = jnp.full(LAYOUT.shape(4), -1, jnp.int32), pull.handle, np.array([3, 1]), 0
        cache, mask = jax.jit(functools.partial(transfer.insert, layout=LAYOUT, on_error="mask"))(*arguments)
        if failed is None:
            assert mask.tolist() == [0, 0]
            got = np.asarray(cache)[[3, 1]].transpose(1, 0, 2, 3, 4).reshape(2, 8, 4, 8)
            np.testing.assert_array_equal(got, code(LAYOUT, 0, 8))
        else:
            assert mask.tolist() == [1, 1] and (cache == -1).all()
            with pytest.raises(jax.errors.JaxRuntimeError, match="insert: the source took it back"):
                jax.jit(functools.partial(transfer.insert, layout=LAYOUT))(*arguments).block_until_ready()


def test_programs_fail_with_the_pull(pair):
    source, reader = (transfer.PagePool(endpoint, LAYOUT, 8) for endpoint in pair)
    run = jax.jit(functools.partial(transfer.insert, layout=LAYOUT, timeout_s=0.2))
    masked = jax.jit(functools.partial(transfer.insert, layout=LAYOUT, on_error="mask"), donate_argnums=0)

    def cache():
        return jnp.zeros(LAYOUT.shape(4), jnp.int32)

    offer = transfer.offer(source, source.allocate(1), streamed=True)
    own = reader.allocate(1)
    pull = transfer.pull(reader, offer.ticket, own)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"DEADLINE_EXCEEDED: .* no answer within the limit"):
        run(cache(), pull.handle, np.array([0]), 0).block_until_ready()
    sent = source.allocate(1)
    source.arrays[0][sent] = np.random.default_rng(1).integers(10, 1 << 20, source.arrays[0][sent].shape)
    arrived, ended = (transfer.pull(reader, transfer.offer(source, sent).ticket, reader.allocate(1)) for _ in range(2))
    arrived.wait()
    sizes = r"pages of \(2, 2, 4, 4, 8, 4 bytes\) of the cache for pages of \(2, 1, 4, 4, 8, 4 bytes\)"
    for each, pages, layer, match in (
        (pull, [4], 0, "cache page 4 of a cache of 4"), (pull, [-1], 0, "cache page -1 of a cache of 4"),
        (pull, [0], 3, r"layer must be in \[0, 3\), got 3"), (arrived, [0, 1], 0, sizes),
    ):  # fmt: skip
        for program in (run, masked):  # errors of the program itself are not masked
            with pytest.raises(jax.errors.JaxRuntimeError, match=match):
                jax.block_until_ready(program(cache(), each.handle, np.array(pages), layer))
    for page, layer, match in ((4, 0, "cache page 4 of a cache of 4"), (0, 3, r"layer must be in \[0, 3\), got 3")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            transfer.emit(cache(), offer.handle, np.array([page]), layer, layout=LAYOUT).block_until_ready()
    pull.cancel()
    ended._end()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxcomm\.transfer: insert: the pull has ended"):
        run(cache(), ended.handle, np.array([0]), 0).block_until_ready()
    for each, bad in ((pull, 1), (arrived, 0), (ended, 1)):
        result, mask = masked(cache() + 5, each.handle, np.array([2]), 0)
        assert mask.tolist() == [bad]
        np.testing.assert_array_equal(result[2], 5 if bad else source.arrays[0][sent[0]])
        assert (np.delete(np.asarray(result), 2, 0) == 5).all()
    with pytest.raises(ValueError, match="on_error must be"):
        transfer.insert(cache(), pull.handle, np.array([0]), 0, layout=LAYOUT, on_error="ignore")
    reader.free(own)
    with pytest.raises(jax.errors.JaxRuntimeError, match="its pages are free"):
        run(cache(), pull.handle, np.array([0]), 1).block_until_ready()
    for wrong in (jnp.zeros((3, 3)), jnp.zeros(LAYOUT.shape(4), jnp.float32)):
        with pytest.raises(ValueError, match=r"insert: cache must have shape \(-1, .* int32, got .* and float32"):
            run(wrong, pull.handle, np.array([0]), 0)
    with pytest.raises(ValueError, match="insert: timeout_s must be a number"):
        transfer.insert(cache(), pull.handle, np.array([0]), 0, layout=LAYOUT, timeout_s=-1)
