"""Endpoints: one per process, with a thread, a name and an incarnation."""

import concurrent.futures
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jaxcomm._core import transfer as _native
from jaxcomm.recorder import _prometheus as recorder
from jaxcomm.transfer import _errors
from jaxcomm.transfer._arrays import ArrayArgument

_MIN_SECRET_BYTES = 16
_COLLECT_EVERY_S = 0.05

# A connection, the request for a lease, the read that begins with it, and whether the connection was there before.
_Request = tuple[int, Any, Any, bool]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of an endpoint.

    Attributes:
      lease_s: seconds for which a source keeps what a reader has opened, unless the reader's endpoint renews it, which
        it does after a third of the time.
      max_lease_s: the longest lease that this endpoint grants.
      connections: connections without a proof of the secret at one time. A further one ends the oldest.
      transfers: fetches that run at the same time.
    """

    lease_s: float = 30.0
    max_lease_s: float = 600.0
    connections: int = 64
    transfers: int = 8


@dataclasses.dataclass(frozen=True)
class Group:
    """The endpoints of one mesh, in the order of its processes.

    Attributes:
      addresses: Endpoint.address of each.
    """

    addresses: tuple[str, ...]

    def __init__(self, addresses: Iterable[str]) -> None:
        object.__setattr__(self, "addresses", (addresses,) if isinstance(addresses, str) else tuple(addresses))
        if not self.addresses:
            raise ValueError("Group: addresses must have at least one address of an endpoint")


class Lease:
    """What a reader has opened at one source: an object in one version, or an offer.

    `started` is the read that the source began with it, or that has ended because the manifest has another digest.
    """

    def __init__(self, endpoint: "Endpoint", peer: int, call: Any, started: Any, what: str) -> None:
        self.version: int = call.version
        self.manifest: bytes = call.manifest
        self.started = started
        self._number: int = call.lease
        self._endpoint, self._peer, self._what = endpoint, peer, what

    def read(self, source: list[Any], destination: list[Any], arrays: list[ArrayArgument]) -> Any:
        """Starts a read. The caller keeps the memory of `arrays` until it has ended."""
        return self._endpoint._native.read(self._peer, self._number, source, destination, arrays)

    def wait(self, read: Any, timeout_s: float) -> None:
        code, text = self._endpoint._native.wait(read, timeout_s)
        if code:
            received, total = self._endpoint._native.progress(read)
            _errors.check(code, f"{text} ({received} of {total} bytes had arrived)", self._what)

    def poll(self, read: Any, limit_s: float) -> bool:
        """Waits for a read, which goes on after the limit. Returns whether it has ended."""
        return bool(self._endpoint._native.poll(read, limit_s))

    def received_bytes(self, read: Any) -> int:
        return int(self._endpoint._native.progress(read)[0])

    def cancel(self, read: Any) -> None:
        """Ends a read at once, if it has not ended. Nothing is written any more."""
        self._endpoint._native.cancel(read)

    def close(self) -> None:
        self._endpoint._native.close(self._peer, self._number)


class Endpoint:
    """Shows arrays of this process to other jobs, and reads theirs.

    Every endpoint of a group of jobs has the same secret. Data is neither encrypted nor protected against changes on
    its way: use a network that you trust. See docs/guide/transfer.md.

    Args:
      name: letters, digits, ".", "_" and "-"; errors of other jobs name it.
      secret: at least 16 bytes, known to all endpoints and to nobody else.
      listen: "host:port" of one interface, the host in digits. None means a free port of the loopback interface, which
        other hosts cannot reach.
      limits: see Limits.
      shared_memory: whether endpoints of one host may use shared memory instead of TCP.

    Attributes:
      address: a text for other jobs, without the secret. It ends with the process.

    Raises:
      ValueError: an argument is not valid, or the address cannot be listened on.
    """

    def __init__(
        self,
        name: str,
        *,
        secret: bytes | str,
        listen: str | None = None,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        secret = secret.encode() if isinstance(secret, str) else bytes(secret)
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"Endpoint: secret must have at least {_MIN_SECRET_BYTES} bytes, got {len(secret)}")
        host, _, port = (listen or "127.0.0.1:0").rpartition(":")
        host = host.strip("[]")
        if host in ("0.0.0.0", "::", ""):
            raise ValueError(f"Endpoint: listen must name one interface of this host, got {listen!r}")
        self.limits = limits or Limits()
        self.name = name
        self._native = _native.start(
            name, secret, host, port, shared_memory, round(self.limits.max_lease_s * 1e3), self.limits.connections
        )
        self.address: str = self._native.address
        self._lock = threading.Lock()
        self._peers: dict[str, int] = {}
        self._kept: dict[int, Any] = {}  # memory of exposures
        self._versions: dict[str, list[tuple[int, int]]] = {}  # of published objects: version, exposure
        self._fetches: dict[str, int] = {}  # by object: those with shardings of several processes
        self._plans: dict[Any, Any] = {}  # of the latest fetches
        self._threads = concurrent.futures.ThreadPoolExecutor(self.limits.transfers, f"transfer-{name}")
        recorder.endpoints.add(self)
        self._finalizer = weakref.finalize(self, self._native.stop)

    def close(self) -> None:
        """Ends all transfers with an error. Readers of this endpoint get an error too."""
        recorder.endpoints.discard(self)
        self._finalizer()
        self._threads.shutdown(wait=True)
        self._kept.clear()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        """Counters since the start: bytes by path, leases, failures by kind, rejected connections."""
        return dict(self._native.stats())

    def waiting(self) -> list[str]:
        """The requests that wait for other endpoints, the longest first: the endpoint, the time, the bytes so far."""
        with self._lock:
            address_of = {peer: address for address, peer in self._peers.items()}
        calls = sorted(self._native.waiting(), key=lambda call: -call[2])
        return [
            f"{what} at {describe(address_of.get(peer, 'closed'))}: {seconds:.1f} s, {received} of {total} bytes"
            for peer, what, seconds, received, total in calls
        ]

    def histograms(self) -> dict[str, list[int]]:
        """Successful requests to other endpoints by time: "open" takes a lease, "read" reads under it.

        Element i counts those that took less than 2**i microseconds, and that no element before counts.
        """
        return dict(self._native.histograms())

    def _peer(self, address: str) -> int:
        with self._lock:
            if (peer := self._peers.get(address)) is None:
                peer = self._peers[address] = self._native.connect(address)
            return peer

    def _check(self, result: tuple[int, str], what: str, address: str, peer: int) -> None:
        """Raises the error of a call. The next call for a lost peer connects anew."""
        try:
            _errors.check(*result, what)
        except _errors.PeerLost:
            with self._lock:
                if self._peers.get(address) == peer:  # another thread may have connected since
                    del self._peers[address]
                    self._native.disconnect(peer)
            raise

    def _begin_open(self, address: str, key: bytes, version: int | None, read: Any = None) -> _Request:
        """Asks for a lease. The connection may be an old one that has ended."""
        is_old = address in self._peers
        peer = self._peer(address)
        request = peer, key, version or 0, round(self.limits.lease_s * 1e3)
        if read is None:
            return peer, self._native.open(*request), None, is_old
        return peer, *self._native.open_and_read(*request, *read), is_old

    def _open(
        self,
        address: str,
        key: bytes,
        version: int | None,
        name: str,
        timeout_s: float,
        read: Any = None,
        begun: _Request | None = None,
    ) -> Lease:
        """Takes a lease of what `name` describes in errors. version: None for tickets, which have none. read: a read
        that begins at once if the manifest has the digest: the digest, whether the lease ends with it, and the
        arguments of Lease.read. begun: the result of _begin_open, if it was called before."""
        deadline = time.monotonic() + timeout_s
        for again in (False, True):
            peer, call, started, is_old = begun or self._begin_open(address, key, version, read)
            begun = None
            exact = f" version {version}" if version is not None and version >= 0 else ""
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                self._check(self._native.wait(call, left_s), f"{name}{exact} of {describe(address)}", address, peer)
                break
            except BaseException as error:
                self._native.cancel(call)
                if started is not None:
                    self._native.cancel(started)
                self._native.close(peer, call.lease)
                if again or not is_old or not isinstance(error, _errors.PeerLost):
                    raise
        exact = f" version {call.version}" if version is not None else ""
        return Lease(self, peer, call, started, f"{name}{exact} of {describe(address)}")

    def _keep(self, expose: Callable[[], tuple[int, str, int]], what: str, memory: Any) -> int:
        """Shows arrays, and keeps their memory as long as they may be read."""
        code, text, exposure = expose()
        _errors.check(code, text, what)
        with self._lock:
            self._kept[exposure] = memory
        self._collect()
        return exposure

    def _collect_later(self, exposure: int) -> None:
        """Frees the memory of an exposure as soon as its last lease has ended."""

        def wait() -> None:
            while self._native.in_use(exposure):
                time.sleep(_COLLECT_EVERY_S)
            self._collect()

        if self._native.in_use(exposure):
            threading.Thread(target=wait, name=f"collect-{self.name}", daemon=True).start()
        else:
            self._collect()

    def _collect(self) -> None:
        """Frees the memory that nobody can read any more."""
        with self._lock:
            for old in [number for number in self._kept if not self._native.in_use(number)]:
                del self._kept[old]


def describe(address: str) -> str:
    """An endpoint in messages: name, incarnation, host and port."""
    try:
        _, _, where, name, incarnation, _ = address.split("/")
    except ValueError:
        return repr(address)
    return f"endpoint {name!r} (incarnation {incarnation}, {where})"


def _key_of(object: str) -> bytes:
    return b"object:" + object.encode()
