"""Caches of attention in pages: offer() at one job, pull() at another."""

import dataclasses
import json
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm import _check
from jaxcomm._core import transfer as _native
from jaxcomm.transfer import _arrays, _errors
from jaxcomm.transfer._endpoint import _TICKET, Endpoint, Lease, Limit, Read, Wanted, start_reads

_ORDER = ("kv", "page", "token", "head", "dim")  # in which the elements of a page are sent


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """How the cache of one rank lies in memory.

    Two pools exchange pages if layers, heads, kv, dim and dtype are equal. All else may differ.

    Attributes:
      layers: number of layers; each has an array of its own.
      heads: number of heads of the whole model.
      dim: elements of a head.
      dtype: element type.
      page_tokens: tokens of a cache page.
      kv: 2 for keys and values; 1 for one latent array (MLA).
      own_heads: (begin, end) of the heads that this rank has; None means all.
      order: order of the dimensions in memory, outermost first: "kv", "page", "token", "head", "dim".
    """

    layers: int
    heads: int
    dim: int
    dtype: Any
    page_tokens: int = 16
    kv: int = 2
    own_heads: tuple[int, int] | None = None
    order: tuple[str, ...] = ("page", "kv", "token", "head", "dim")

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(_ORDER):
            raise ValueError(f"PageLayout: order must have {', '.join(_ORDER)} once each, got {self.order!r}")
        for name in ("layers", "heads", "dim", "page_tokens", "kv"):
            _check.whole("PageLayout", name, getattr(self, name), 1)
        begin, end = self.head_range
        if not 0 <= begin < end <= self.heads:
            raise ValueError(f"PageLayout: own_heads must be inside of heads, got {self}")
        if not _arrays.can_send(np.dtype(self.dtype)):
            raise ValueError(f"PageLayout: dtype must be an element type of data, got {self.dtype!r}")

    @property
    def head_range(self) -> tuple[int, int]:
        return self.own_heads or (0, self.heads)

    def of_rank(self, rank: int, size: int) -> "PageLayout":
        """The layout of a rank of `size` tensor-parallel ranks. If there are more ranks than heads, several ranks have
        the same head."""
        if not 0 <= rank < size or (self.heads % size and size % self.heads):
            raise ValueError(f"PageLayout: {self.heads} heads cannot be split over {size} ranks, rank {rank}")
        if size <= self.heads:
            each = self.heads // size
            return dataclasses.replace(self, own_heads=(rank * each, (rank + 1) * each))
        head = rank * self.heads // size
        return dataclasses.replace(self, own_heads=(head, head + 1))

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of the array of a layer."""
        begin, end = self.head_range
        sizes = {"kv": self.kv, "page": num_pages, "token": self.page_tokens, "head": end - begin, "dim": self.dim}
        return tuple(sizes[name] for name in self.order)

    def _common(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "heads": self.heads,
            "dim": self.dim,
            "kv": self.kv,
            "dtype": str(np.dtype(self.dtype)),
        }


class PagePool:
    """Memory of the host for pages of a cache: those that are offered, and those that arrive.

    Args:
      endpoint: that of this process.
      layout: see PageLayout.
      num_pages: cache pages of each layer.

    Attributes:
      arrays: one numpy.ndarray per layer, of layout.shape(num_pages). Write to allocated pages only.
    """

    def __init__(self, endpoint: Endpoint, layout: PageLayout, num_pages: int) -> None:
        self.endpoint, self.layout = endpoint, layout
        self.num_pages = num_pages = _check.whole("PagePool", "num_pages", num_pages, 0)
        self.arrays = [_arrays.empty(layout.shape(num_pages), layout.dtype) for _ in range(layout.layers)]
        self._generations = np.zeros(num_pages, np.int64)
        self._free = list(range(num_pages))[::-1]
        self._users: dict[int, list[Any]] = {}  # by page: the offers and pulls that must end before the page is free

    def allocate(self, count: int) -> list[int]:
        """Numbers of cache pages that nobody uses.

        Raises:
          ValueError: count is no integer, or negative.
          MemoryError: there are not enough.
        """
        count = _check.whole("PagePool", "count", count, 0)
        if count > len(self._free):
            raise MemoryError(f"PagePool: {count} cache pages wanted, {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Gives cache pages back.

        Raises:
          ValueError: a page is free already, out of range, or in an offer or a pull that has not ended.
        """
        pages = self._checked(pages)
        for page in pages:
            for user in self._users.get(page, []):
                if not user.done:
                    raise ValueError(f"PagePool: cache page {page} is in {user}, which has not ended")
        for page in pages:
            for user in self._users.pop(page, []):
                user._end()
            self._generations[page] += 1
            self._free.append(page)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def _checked(self, pages: Sequence[int]) -> list[int]:
        pages = [_check.integer("PagePool", "a cache page", page) for page in pages]
        free = set(self._free)
        for page in pages:
            if not 0 <= page < self.num_pages or page in free:
                raise ValueError(f"PagePool: cache page {page} is not allocated (the pool has {self.num_pages})")
        if len(set(pages)) != len(pages):
            raise ValueError(f"PagePool: a cache page is named twice in {pages}")
        return pages

    def _add_user(self, pages: Sequence[int], made: Any) -> None:
        for page in pages:
            users = self._users.get(page, [])
            self._users[page] = [user for user in users if type(user) is not type(made) or not user.done] + [made]

    def _ordered(self) -> list[np.ndarray]:
        axes = [self.layout.order.index(name) for name in _ORDER]
        return [x.transpose(axes) for x in self.arrays]

    def _arguments(self, pages: Sequence[int]) -> list[_arrays.ArrayArgument]:
        return [_arrays.argument(x, _ORDER.index("page"), pages) for x in self._ordered()]


class Offer:
    """Cache pages that one reader may pull.

    Attributes:
      ticket: a text for the reader, which gives the right to read these pages and nothing else. Hand it on by a way
        that only the reader sees.
      handle: a number for emit().
    """

    def __init__(self, pool: PagePool, pages: list[int], exposure: int, ticket: str) -> None:
        self._pool, self._pages, self._exposure, self.ticket = pool, pages, exposure, ticket
        native = pool.endpoint._native
        self.handle = _native.add_offer(native, exposure, pool._arguments(pages))
        self._end = weakref.finalize(self, _native.remove, self.handle)

    def __repr__(self) -> str:
        return f"an offer of {len(self._pages)} cache pages"

    @property
    def done(self) -> bool:
        """Whether the pages may be used again: the reader has them, or its lease has ended."""
        return not self._pool.endpoint._native.in_use(self._exposure)

    def revoke(self) -> None:
        """Ends the offer. A pull that has not ended fails."""
        self._pool.endpoint._native.withdraw(self._exposure, True)

    def mark_ready(self, layer: int) -> None:
        """Lets the reader have a layer of an offer with streamed=True. Its pages have been written."""
        layer = _check.whole("Offer", "layer", layer, 0, self._pool.layout.layers - 1)
        self._pool.endpoint._native.mark_ready(self._exposure, layer)


def offer(
    pool: PagePool,
    pages: Sequence[int],
    *,
    tokens: int | None = None,
    reader: str = "",
    lease_s: float = 30.0,
    streamed: bool = False,
) -> Offer:
    """Shows cache pages to one reader. They must not be used again until Offer.done.

    Args:
      pool: where the pages are.
      pages: their numbers, in the order of the tokens.
      tokens: tokens that they hold; None means that all pages are full.
      reader: name of the endpoint that may pull; empty: any that has the ticket.
      lease_s: seconds until the offer ends if nobody has begun to pull.
      streamed: the layers are not written yet; Offer.mark_ready gives each to the reader.

    Raises:
      ValueError: pages, tokens or lease_s are not valid.
      TypeError: a page is no integer.
      Cancelled: the endpoint was closed.
    """
    pages = pool._checked(pages)
    layout, endpoint = pool.layout, pool.endpoint
    lease_s = _check.number("offer", "lease_s", lease_s, 1e-3, math.inf)
    most = len(pages) * layout.page_tokens
    tokens = most if tokens is None else _check.whole("offer", "tokens", tokens, 0)
    if not most - layout.page_tokens < tokens <= most:
        raise ValueError(f"offer: {len(pages)} cache pages of {layout.page_tokens} tokens cannot hold {tokens} tokens")
    secret = os.urandom(16)
    manifest = {**layout._common(), "page_tokens": layout.page_tokens, "own_heads": layout.head_range, "tokens": tokens}

    def expose() -> tuple[int, str, int]:
        return endpoint._native.expose(
            _TICKET + secret,
            0,
            json.dumps(manifest).encode(),
            pool._arguments(pages),
            not streamed,
            once=True,
            reader=reader,
            lease_s=lease_s,
            generations=pool._generations.ctypes.data,
            expected=[(page, int(pool._generations[page])) for page in pages],
        )

    number = endpoint._keep(expose, f"offer of endpoint {endpoint.name!r}", pool)
    made = Offer(pool, pages, number, f"{endpoint.address}#{secret.hex()}")
    pool._add_user(pages, made)
    return made


class Pull:
    """Cache pages on their way into a pool.

    Attributes:
      handle: a number for insert().
    """

    def __init__(
        self, pool: PagePool, pages: list[int], leases: Sequence[Lease], reads: list[list[tuple[Lease, Any]]]
    ) -> None:
        self._pool, self._leases, self._reads = pool, leases, reads
        calls = [[read for _, read in of_layer] for of_layer in reads]
        self.handle = _native.add_pull(pool.endpoint._native, calls, pool._arguments(pages))
        self._end = weakref.finalize(self, _end_pull, leases, reads, self.handle, pool.arrays)

    def __repr__(self) -> str:
        return "a pull"

    @property
    def done(self) -> bool:
        """Whether all layers have arrived, or the pull has failed: nothing is written to its pages any more."""
        return all(self.is_ready(layer) for layer in range(len(self._reads)))

    def is_ready(self, layer: int) -> bool:
        """Whether a layer has arrived, or failed to: wait() does not block."""
        layer = _check.whole("Pull", "layer", layer, 0, len(self._reads) - 1)
        return all(read.done for _, read in self._reads[layer])

    def wait(self, layer: int | None = None, *, timeout_s: float = 60.0) -> None:
        """Waits for a layer, or for all of them. Its pages are whole and of one time, or this raises.

        Raises:
          Revoked: the source used the pages again, ended the offer, or the lease ended.
          PeerLost: the source died.
          TransferTimeout: it lives but did not answer in time. The pull goes no further.
        """
        limit = Limit(timeout_s)
        if layer is not None:
            layer = _check.whole("Pull", "layer", layer, 0, len(self._reads) - 1)
        try:
            for reads in self._reads if layer is None else [self._reads[layer]]:
                for lease, read in reads:
                    lease.wait(read, limit, self._leases)
        except BaseException:
            self.cancel()
            raise
        if self.done:
            self._close()

    def cancel(self) -> None:
        """Ends the pull at once. Nothing is written to the pages any more."""
        _cancel(self._leases, self._reads)

    def _close(self) -> None:
        for lease in self._leases:
            lease.close()


def _cancel(leases: Sequence[Lease], reads: list[list[tuple[Lease, Any]]]) -> None:
    for of_layer in reads:
        for lease, read in of_layer:
            lease.cancel(read)
    for lease in leases:
        lease.close()


def _end_pull(leases: Sequence[Lease], reads: list[list[tuple[Lease, Any]]], handle: int, arrays: Any) -> None:
    """Afterwards, nothing is written to `arrays`, and no program reads them."""
    _cancel(leases, reads)
    _native.remove(handle)


def pull(
    pool: PagePool,
    tickets: str | Sequence[str],
    pages: Sequence[int],
    *,
    skip_tokens: int = 0,
    timeout_s: float = 60.0,
) -> Pull:
    """Starts to read offered cache pages into pages of an own pool, layer by layer.

    The source may have another page size, another order of dimensions, and another number of tensor-parallel ranks.

    Args:
      pool: where the pages go.
      tickets: Offer.ticket of each rank of the source. Heads that several ranks have are read from one of them, and
        from another one if it is lost.
      pages: own pages for the tokens from skip_tokens on. The rest of the last page becomes zero.
      skip_tokens: tokens that this job has already: a prefix. A multiple of the page size of the pool.
      timeout_s: limit of the wait for the sources' answers to the tickets.

    Raises:
      ValueError: a ticket, pages or skip_tokens are not valid.
      TypeError: a page is no integer.
      Cancelled: the endpoint was closed.
      Refused: the layouts do not fit, or a ticket is for another reader.
      NotFound, VersionGone: a ticket has expired or was used before.
      PeerLost: a source does not answer, and no other ticket has its heads; or its answer was lost.
      TransferTimeout: a source lives but did not answer in time.
    """
    layout, endpoint = pool.layout, pool.endpoint
    pages = pool._checked(pages)
    if _check.whole("pull", "skip_tokens", skip_tokens, 0) % layout.page_tokens:
        raise ValueError(f"pull: skip_tokens must be a multiple of {layout.page_tokens}, got {skip_tokens}")
    wanted = {}
    for i, ticket in enumerate([tickets] if isinstance(tickets, str) else tickets):
        address, _, secret = ticket.partition("#")
        wanted[i] = Wanted(address, _TICKET + bytes.fromhex(secret))
    if not wanted:
        raise ValueError("pull: there are no tickets")
    opened, lost = endpoint._open("pull", wanted, Limit(timeout_s))
    leases = list(opened.values())
    try:
        reads = _start(pool, leases, next(iter(lost.values()), None), pages, skip_tokens)
    except BaseException:
        for lease in leases:
            lease.close()
        raise
    made = Pull(pool, pages, leases, reads)
    pool._add_user(pages, made)
    return made


def _start(
    pool: PagePool, leases: Sequence[Lease], lost: _errors.PeerLost | None, pages: Sequence[int], skip_tokens: int
) -> list[list[tuple[Lease, Any]]]:
    layout = pool.layout
    if not leases and lost is not None:
        raise lost
    manifests = [json.loads(lease.manifest) for lease in leases]
    for manifest in manifests:
        other = {name: manifest[name] for name in layout._common()}
        if other != layout._common():
            raise _errors.Refused(f"jaxcomm.transfer: pull: the source has {other}, this pool {layout._common()}")
        if manifest["tokens"] != manifests[0]["tokens"]:
            raise _errors.Refused("jaxcomm.transfer: pull: the tickets hold other numbers of tokens")
    tokens = manifests[0]["tokens"]
    wanted = max(math.ceil((tokens - skip_tokens) / layout.page_tokens), 0)
    if len(pages) != wanted:
        raise ValueError(f"pull: {wanted} pages are needed for tokens [{skip_tokens}, {tokens}), got {len(pages)}")
    begin, end = layout.head_range
    heads = [tuple(m["own_heads"]) for m in manifests]
    try:
        moves = _native.moves([((first,), (last,)) for first, last in heads], [((begin,), (end,))])
    except ValueError:
        raise lost or _errors.Refused(
            f"jaxcomm.transfer: pull: heads [{begin}, {end}) are not in the tickets, which have {heads}"
        ) from None
    if end_of_last := (tokens - skip_tokens) % layout.page_tokens if pages else 0:
        for x in pool._ordered():  # attention multiplies what it masks by zero, which a NaN survives
            x[:, pages[-1], end_of_last:] = 0
    arguments = pool._arguments(pages)

    def boxes(source: int, first: int, last: int, layer: int) -> tuple[list[Any], list[Any]]:
        """Heads of a layer at a source, and here."""
        there, here = [], []
        page_tokens = manifests[source]["page_tokens"]
        for (page, token), (own_page, own_token), count, length in _spans(
            skip_tokens, tokens, page_tokens, layout.page_tokens
        ):
            sizes = (layout.kv, count, length, last - first, layout.dim)
            there.append((layer, *_sized((0, page, token, first - heads[source][0], 0), sizes)))
            here.append((layer, *_sized((0, own_page, own_token, first - begin, 0), sizes)))
        return there, here

    requests: list[Read] = []
    for layer in range(layout.layers):
        for source, _, (first,), (last,) in moves:
            others = [other for other, (low, high) in enumerate(heads) if low <= first and last <= high]
            order = sorted(others, key=lambda other: other != source)
            requests.append([(leases[each], *boxes(each, first, last, layer)) for each in order])
    calls = start_reads(pool.endpoint, requests, arguments)
    reads = [(request[0][0], call) for request, call in zip(requests, calls, strict=True)]
    return [reads[at : at + len(moves)] for at in range(0, len(reads), len(moves))]


def _sized(begin: tuple[int, ...], sizes: tuple[int, ...]) -> _arrays.Box:
    return begin, tuple(at + n for at, n in zip(begin, sizes, strict=True))


_Span = tuple[tuple[int, int], tuple[int, int], int, int]


def _spans(skip: int, tokens: int, source_page: int, own_page: int) -> list[_Span]:
    """Pieces of tokens [skip, tokens) that lie in one page on both sides.

    (page, token) at the source, the same here, the number of pages, and of tokens in each. Full pages of equal sizes
    are one span.
    """
    spans: list[_Span] = []
    at = skip
    while at < tokens:
        here = at - skip
        length = min(source_page - at % source_page, own_page - here % own_page, tokens - at)
        count = (tokens - at) // length if length == source_page == own_page else 1
        spans.append((divmod(at, source_page), divmod(here, own_page), count, length))
        at += count * length
    return spans
