"""Endpoints: one per process, with a thread, a name and an incarnation."""

import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxcomm import _check
from jaxcomm._config import LONGEST_S
from jaxcomm._core import transfer as _native
from jaxcomm.recorder import _prometheus as recorder
from jaxcomm.recorder import _start
from jaxcomm.transfer import _errors
from jaxcomm.transfer._arrays import ArrayArgument

_MIN_SECRET_BYTES = 16
_COLLECT_EVERY_S = 0.05

_LATEST = -1
_OBJECT, _TICKET = b"object:", b"ticket:"  # what a key begins with

# A connection, the request for a lease, and the read that begins with it.
_Request = tuple[int, Any, Any]
_T = TypeVar("_T")


class Wanted(NamedTuple):
    """What a lease is asked for.

    Attributes:
      address, key, version: of the source; an object or a ticket; _LATEST for the newest version and for tickets.
      read: a read that begins at once if the manifest has the digest: the digest, whether the lease ends with it, and
        the arguments of Lease.read.
    """

    address: str
    key: bytes
    version: int = _LATEST
    read: Any = None


class Limit:
    """The time that a call has, with all of its waits."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = _check.number("transfer", "timeout_s", timeout_s, 0, math.inf)
        self._ends = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(self._ends - time.monotonic(), 0.0)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of an endpoint.

    Attributes:
      lease_s: seconds for which a source keeps what a reader has opened, unless the reader's endpoint renews it, which
        it does after a third of the time.
      max_lease_s: the longest lease that this endpoint grants. A TCP connection ends if the other host, not only its
        process, has been silent for as long, but for at least 2 s.
      connections: connections without a proof of the secret at one time. A further one ends the oldest.
      transfers: fetches that run at the same time.

    Raises:
      ValueError: seconds are not between 0.001 and 10^9, or others no integers between 1 and 10^6.
    """

    lease_s: float = 30.0
    max_lease_s: float = 600.0
    connections: int = 64
    transfers: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name.endswith("_s"):
                _check.number("Limits", field.name, getattr(self, field.name), 1e-3, LONGEST_S)
            else:
                _check.whole("Limits", field.name, getattr(self, field.name), 1, 10**6)


@dataclasses.dataclass(frozen=True)
class Group:
    """The endpoints of one mesh, in the order of its processes.

    Attributes:
      addresses: Endpoint.address of each.
    """

    addresses: tuple[str, ...]

    def __init__(self, addresses: Iterable[str]) -> None:
        object.__setattr__(self, "addresses", (addresses,) if isinstance(addresses, str) else tuple(addresses))
        if not self.addresses or not all(isinstance(address, str) for address in self.addresses):
            raise ValueError(f"Group: addresses must be at least one Endpoint.address, got {self.addresses!r}")


def _run_for(taken: "list[concurrent.futures.Future[_T]]", run: Callable[[], _T]) -> None:
    """Gives the result of `run` to the future in the list. No frame keeps it, because an error keeps its frames."""
    future = taken.pop()
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)
            del future


class Lease:
    """What a reader has opened at one source: an object in one version, or an offer.

    `started` is the read that the source began with it, or that has ended because the manifest has another digest.
    """

    def __init__(self, endpoint: "Endpoint", request: _Request, what: str) -> None:
        self._peer, call, self.started = request
        self.version: int = call.version
        self.manifest: bytes = call.manifest
        self._number: int = call.lease
        self._endpoint, self._what = endpoint, what

    def read(self, source: list[Any], destination: list[Any], arrays: list[ArrayArgument]) -> Any:
        """Starts a read. The caller keeps the memory of `arrays` until it has ended."""
        return start_reads(self._endpoint, [[(self, source, destination)]], arrays)[0]

    def wait(self, read: Any, limit: Limit, others: Sequence["Lease"] = ()) -> None:
        """Waits for a read, which may go on under one of the other leases. Its error names the latest source."""
        code, text = self._endpoint._native.wait(read, limit.left_s(), limit.timeout_s)
        if code:
            received, total = self._endpoint._native.progress(read)
            latest = next((lease for lease in others if lease._peer == read.peer), self)
            _errors.check(code, f"{text} ({received} of {total} bytes had arrived)", latest._what)

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


# A read: for each lease under which it may begin, the boxes at the source, and those here.
Read = Sequence[tuple[Lease, list[Any], list[Any]]]


def start_reads(endpoint: "Endpoint", reads: Sequence[Read], arrays: list[ArrayArgument]) -> list[Any]:
    """Starts reads. A read begins anew under its next lease if a source is lost.

    The caller keeps the memory of `arrays` until they have ended.
    """
    sources = [[(lease._peer, lease._number, there, here) for lease, there, here in read] for read in reads]
    return list(endpoint._native.read(sources, arrays))


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
        secret = secret.encode() if isinstance(secret, str) else secret
        if not isinstance(secret, bytes) or len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"Endpoint: secret must be bytes or a text of at least {_MIN_SECRET_BYTES} bytes")
        host, port = _interface("Endpoint: listen", "127.0.0.1:0" if listen is None else listen)
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
        self._plans: dict[Any, Any] = {}  # of the latest fetches
        self._threads = concurrent.futures.ThreadPoolExecutor(self.limits.transfers, f"transfer-{name}")
        self._num_submitted = 0  # to these threads, without those that have ended
        recorder.endpoints.add(self)
        self._finalizer = weakref.finalize(self, self._native.stop)

    def close(self) -> None:
        """Ends all transfers with an error. Readers of this endpoint get an error too."""
        recorder.endpoints.discard(self)
        self._finalizer()
        self._threads.shutdown(wait=True)
        self._kept.clear()
        self._plans.clear()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        """Counters since the start: bytes by path, leases, failures by kind, rejected connections, microseconds.

        The time of successful reads, read_us, is that until the first data (read_wait_us), until the last
        (read_wire_us, without the copies of the next), of copies to the destination (read_place_us; over TCP, long runs
        need none), and from the last data to the end, when the source confirms them (read_commit_us).
        """
        return dict(self._native.stats())

    def traffic(self) -> dict[str, dict[str, int]]:
        """The bytes by path of stats() for each other endpoint by name."""
        return dict(self._native.traffic())

    def waiting(self) -> list[str]:
        """The requests that wait for other endpoints, the longest first: the object and version, the endpoint, the
        time, the bytes so far of a read."""
        with self._lock:
            address_of = {peer: address for address, peer in self._peers.items()}
        calls = sorted(self._native.waiting(), key=lambda call: -call[4])
        return [
            f"{what} of {_what(key, version)} at {describe(address_of.get(peer, 'closed'))}: {seconds:.1f} s"
            + (f", {received} of {total} bytes" if total else "")
            for peer, what, key, version, seconds, received, total in calls
        ]

    def histograms(self) -> dict[str, list[int]]:
        """Successful requests to other endpoints by time: "open" takes a lease, "read" reads under it.

        Element i counts those that took less than 2**i microseconds, and that no element before counts.
        """
        return dict(self._native.histograms())

    def _submit(
        self, run: Callable[[], _T], limit: Limit, late: Callable[[], Exception]
    ) -> "concurrent.futures.Future[_T]":
        """Runs a transfer on one of the threads. If none takes it within the limit, its error is that of `late`."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        held = weakref.ref(future)  # the timer must not keep the result

        def expire() -> None:
            if submitted.cancel() and (waiting := held()) and waiting.set_running_or_notify_cancel():
                waiting.set_exception(late())

        def count(_: object) -> None:
            with self._lock:
                self._num_submitted -= 1

        try:
            submitted = self._threads.submit(_run_for, [future], run)
        except RuntimeError:  # the endpoint was closed: `run` has this error
            _run_for([future], run)
            return future
        with self._lock:
            self._num_submitted += 1
            waits = self._num_submitted > self.limits.transfers
        submitted.add_done_callback(count)
        if waits:
            timer = threading.Timer(min(limit.left_s(), LONGEST_S), expire)
            timer.daemon = True
            future.add_done_callback(lambda _: timer.cancel())
            timer.start()
        return future

    def _check_open(self, what: str) -> None:
        if not self._finalizer.alive:
            raise _errors.Cancelled(f"jaxcomm.transfer: {what}: the endpoint {self.name!r} was closed")

    def _peer(self, address: str) -> int:
        with self._lock:
            if (peer := self._peers.get(address)) is None:
                _interface("address of an endpoint", address.removeprefix("tcp://").partition("/")[0])
                _start.start_if_numbered()
                try:
                    peer = self._peers[address] = self._native.connect(address)
                except ValueError:
                    self._check_open(f"connection to {describe(address)}")
                    raise
            return peer

    def _wait(self, call: Any, limit: Limit, what: str, address: str, peer: int) -> None:
        """Waits for a request, or raises its error. The next one to a lost peer connects anew."""
        code, text = self._native.wait(call, limit.left_s(), limit.timeout_s)
        try:
            _errors.check(code, text, f"{what} of {describe(address)}")
        except _errors.PeerLost:
            with self._lock:
                if self._peers.get(address) == peer:  # another thread may have connected since
                    del self._peers[address]
                    self._native.disconnect(peer)
            raise

    def _begin_open(self, wanted: Wanted) -> _Request:
        peer = self._peer(wanted.address)
        request = peer, wanted.key, wanted.version, round(self.limits.lease_s * 1e3)
        if wanted.read is None:
            return peer, self._native.open(*request), None
        return peer, *self._native.open_and_read(*request, *wanted.read)

    def _give_up(self, request: _Request) -> None:
        """Ends a request and its lease. Nothing is written any more."""
        peer, call, started = request
        self._native.cancel(call)
        if started is not None:
            self._native.cancel(started)
        self._native.close(peer, call.lease)

    def _open(
        self, what: str, wanted: Mapping[int, Wanted], limit: Limit, begun: Mapping[int, _Request] | None = None
    ) -> tuple[dict[int, Lease], dict[int, _errors.PeerLost]]:
        """Takes leases, for `what` in errors, from all sources at once. A source that is lost has an error instead.

        begun: results of _begin_open. What began on an old connection that has ended is tried once more.
        """
        leases: dict[int, Lease] = {}
        lost: dict[int, _errors.PeerLost] = {}
        with contextlib.ExitStack() as undo:
            while wanted:
                requests = dict(begun or {})
                begun = None
                for i, each in wanted.items():
                    if i not in requests:
                        requests[i] = self._begin_open(each)
                    undo.callback(self._give_up, requests[i])
                again = {}
                for i, (address, key, version, _) in wanted.items():
                    peer, call, _ = requests[i]
                    try:
                        self._wait(call, limit, f"{what}: {_what(key, version)}", address, peer)
                    except _errors.PeerLost as error:
                        if call.retry and i not in lost:
                            again[i] = wanted[i]
                        lost[i] = error
                    except (_errors.NotFound, _errors.VersionGone) as error:
                        if i not in lost or not key.startswith(_TICKET):
                            raise
                        text = f"{lost[i]}; the source has taken the ticket, if it is one: ask for a new offer"
                        raise _errors.PeerLost(text) from error
                    else:
                        lost.pop(i, None)
                        name = f"{what}: {_what(key, call.version)} of {describe(address)}"
                        leases[i] = Lease(self, requests[i], name)
                wanted = again
            undo.pop_all()
        return leases, lost

    def _keep(self, expose: Callable[[], tuple[int, str, int]], what: str, memory: Any) -> int:
        """Shows arrays, and keeps their memory as long as they may be read."""
        self._check_open(what)
        code, text, exposure = expose()
        if code:
            raise ValueError(f"{what}: {text}")
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


def _interface(what: str, text: str) -> tuple[str, str]:
    """Checks "host:port", the host in digits. Returns both, the host in its shortest form."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise ValueError(f"{what}: {text!r} is no address: expected host:port, with the host in digits") from None
    own = getattr(address, "ipv4_mapped", None) or address
    if own.is_unspecified:
        raise ValueError(f"{what} must name one interface of a host, got {text!r}")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{what} must have a port from 0 to 65535, got {text!r}")
    return str(address), port


def describe(address: str) -> str:
    """An endpoint in messages: name, incarnation, host and port."""
    try:
        _, _, where, name, incarnation, _ = address.split("/")
    except ValueError:
        return repr(address)
    return f"endpoint {name!r} (incarnation {incarnation}, {where})"


def _key_of(object: str) -> bytes:
    return _OBJECT + object.encode()


def _what(key: bytes, version: int) -> str:
    """What is asked for, in messages, without the secret of a ticket."""
    if not key.startswith(_OBJECT):
        return "a ticket" if key else "an ended lease"
    return repr(key.removeprefix(_OBJECT).decode()) + (f" version {version}" if version >= 0 else "")
