"""Peers that do not know the secret, or that break the protocol. The oracle is a second implementation in Python."""

import collections
import os
import resource
import struct

import numpy as np
import pytest
import stranger
from test_weights import wait_until

from jaxcomm import transfer

SECRET = "a secret of tests only"
GARBAGE = {
    "nothing": b"",
    "zeros": bytes(4),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "random": os.urandom(1 << 16),
    "huge": b"\xff" * 4096,
}


@pytest.fixture(scope="module")
def source():
    limits = transfer.Limits(connections=8)
    with transfer.Endpoint("source", secret=SECRET, shared_memory=False, limits=limits) as endpoint:
        transfer.publish(endpoint, "x", np.arange(100), 1)
        yield endpoint


@pytest.fixture(autouse=True)
def serves_afterwards(source):
    yield
    with transfer.Endpoint("reader", secret=SECRET, shared_memory=False) as reader:
        fetched = transfer.fetch(reader, transfer.Group(source.address), "x", 1, None).result()
    np.testing.assert_array_equal(fetched[""], np.arange(100))
    wait_until(lambda: source.stats()["leases"] == 0)


def counters(source):
    return {name: n for name, n in source.stats().items() if name != "rejected_connections"}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_moves_one_counter(source, data):
    before, rejected = counters(source), source.stats()["rejected_connections"]
    stream, _, _ = stranger.connect(source.address)
    with stream:
        try:
            stream.sendall(data)
            stream.shutdown(1)
        except OSError:
            pass  # it has closed the connection already
        assert stranger.ended(stream)
    wait_until(lambda: source.stats()["rejected_connections"] == rejected + 1)
    assert counters(source) == before


def test_a_slow_stranger_is_cut_off(source):
    stream, *_ = stranger.connect(source.address)
    with stream:
        stream.sendall(b"jaxcommT")
        assert stranger.ended(stream), "no limit on the time for the proof"


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.full)])
def test_many_strangers_keep_nobody_out(source, count):
    """They stay connected, as many as this process may have. Each hundredth begins a proof."""
    before, rejected = counters(source), source.stats()["rejected_connections"]
    most = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000)
    streams = collections.deque()
    with transfer.Endpoint("reader", secret=SECRET, shared_memory=False) as reader:
        for number in range(count):
            streams.append(stranger.connect(source.address)[0])
            if number % 100 == 0:
                streams[-1].send(b"jaxcommT")
            if number % 1000 == 999:
                fetched = transfer.fetch(reader, transfer.Group(source.address), "x", 1, None).result()
                np.testing.assert_array_equal(fetched[""], np.arange(100))
                reader._native.disconnect(reader._peers.popitem()[1])  # the next one is among the strangers again
            if len(streams) > most:
                streams.popleft().close()
    for stream in streams:
        stream.close()
    wait_until(lambda: source.stats()["rejected_connections"] == rejected + count)
    wait_until(lambda: source.stats()["leases"] == 0)
    changed = {name for name, n in counters(source).items() if n != before[name]}
    assert changed <= {"tcp_sent_bytes", "leases_granted", "reads_served"}, "what the reader has done"


def test_the_proof_is_that_of_hmac(source):
    peer = stranger.Peer(source.address, SECRET.encode())
    peer.open(b"object:x", lease_ms=10**9)
    assert source.stats()["leases"] == 1
    assert peer.lease_ms == source.limits.max_lease_s * 1000  # what it grants; the peer renews in time for this
    peer.stream.close()
    wait_until(lambda: source.stats()["leases"] == 0)


def answer_to(source, make):
    stream, name, incarnation = stranger.connect(source.address)
    with stream:
        hello = stranger.receive(stream, 48)
        stream.sendall(make(hello, name, incarnation))
        reply = struct.unpack("<II32s", stranger.receive(stream, 40))
        assert stranger.ended(stream)
    assert reply[2] == bytes(32), "a tag would help a stranger"
    return reply[0]


def test_wrong_proofs(source):
    secret = SECRET.encode()
    assert answer_to(source, lambda h, n, i: stranger.proof(h, secret, n, i, version=9)) == 1
    assert answer_to(source, lambda h, n, i: stranger.proof(h, b"another secret...", n, i)) == 2
    assert answer_to(source, lambda h, n, i: stranger.proof(h, secret, n, i + 1)) == 3
    assert answer_to(source, lambda h, n, i: stranger.proof(h, secret, "other", i)) == 3


def test_a_replayed_proof_is_refused(source):
    seen = []

    def record(hello, name, incarnation):
        seen.append(stranger.proof(hello, b"x" * 16, name, incarnation))
        return seen[0]

    stream, name, incarnation = stranger.connect(source.address)
    with stream:
        good = stranger.proof(stranger.receive(stream, 48), SECRET.encode(), name, incarnation)
        stream.sendall(good)
        assert struct.unpack("<I", stranger.receive(stream, 40)[:4]) == (0,)
    assert answer_to(source, lambda *_: good) == 2


BROKEN = {
    "unknown kind": lambda peer: peer.send(77),
    "kind of the network": lambda peer: peer.send(1 << 16),
    "slot": lambda peer: peer.send(2 << 16, id=3),
    "bulk in a slot": lambda peer: peer.send(3 << 30 | 9, size=10),
    "huge": lambda peer: peer.send(stranger.OPEN, size=1 << 31),
    "short key": lambda peer: peer.send(stranger.OPEN, payload=struct.pack("<I", 1000) + b"x"),
    "no pieces": lambda peer: peer.send(stranger.READ, at=peer.open(b"object:x"), payload=struct.pack("<I", 1 << 31)),
    "dimensions": lambda peer: peer.send(
        stranger.READ, at=peer.open(b"object:x"), payload=struct.pack("<III", 1, 0, 1 << 30)
    ),
    "replayed frame": lambda peer: [peer.send(stranger.CANCEL), setattr(peer, "sent", 0), peer.send(stranger.CANCEL)],
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=BROKEN)
def test_a_peer_that_breaks_the_protocol_is_cut_off(source, act):
    peer = stranger.Peer(source.address, SECRET.encode())
    with peer.stream:
        act(peer)
        assert stranger.ended(peer.stream)


def test_a_lease_of_another_peer_is_refused(source):
    secret = SECRET.encode()
    owner, other = stranger.Peer(source.address, secret), stranger.Peer(source.address, secret)
    with owner.stream, other.stream:
        lease = owner.open(b"object:x")
        other.send(4, at=lease)  # closes it
        other.send(stranger.READ, 5, lease, struct.pack("<IIIqq", 1, 0, 1, 0, 4))
        assert other.receive()[:3] == (stranger.REFUSED, 5, 3)
        assert source.stats()["leases"] == 1
