"""The protocol of ffi/transport/tcp_network.cc, written a second time: for peers that break it."""

import hashlib
import hmac
import os
import socket
import struct

OPEN, READ, CANCEL, WATCH = 1, 2, 5, 6
OPENED, REFUSED = 7, 8


def mac(key, message):
    return hmac.new(key, message, hashlib.sha256).digest()


def connect(address):
    """A connection to the address of an endpoint, and its name and incarnation."""
    _, _, where, name, incarnation, _ = address.split("/")
    host, port = where.rsplit(":", 1)
    stream = socket.create_connection((host, int(port)), timeout=30)
    return stream, name, int(incarnation, 16)


def receive(stream, size):
    data = b""
    while len(data) < size:
        got = stream.recv(size - len(data))
        if not got:
            raise ConnectionResetError("the endpoint closed the connection")
        data += got
    return data


def ended(stream):
    """Whether the endpoint closes the connection, within the time limit of the socket."""
    try:
        while stream.recv(4096):
            pass
        return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def proof(hello, secret, name, incarnation, version=4):
    said = b"jaxcommT" + struct.pack("<II", version, 0) + os.urandom(32)
    said += struct.pack("<QQ64s64s", 77, incarnation, b"stranger", name.encode())
    return said + mac(secret, b"client" + hello + said)


class Peer:
    """A client that knows the secret."""

    def __init__(self, address, secret):
        self.stream, name, incarnation = connect(address)
        hello = receive(self.stream, 48)
        said = proof(hello, secret, name, incarnation)
        self.stream.sendall(said)
        answer, _, tag = struct.unpack("<II32s", receive(self.stream, 40))
        said = hello + said[:-32]
        assert answer == 0 and tag == mac(secret, b"server" + said)
        self.key, self.sent = mac(secret, b"connection" + said), 0

    def send(self, kind, id=0, at=0, payload=b"", size=None):
        header = struct.pack("<IIQQII", kind, len(payload) if size is None else size, id, at, 0, 0)
        tag = mac(self.key, struct.pack("<QQ", self.sent, 1) + header + payload)[:16]
        self.sent += 1
        self.stream.sendall(header + tag + payload)

    def receive(self):
        kind, size, id, at, _, _ = struct.unpack("<IIQQII", receive(self.stream, 48)[:32])
        return kind, id, at, receive(self.stream, size)

    def open(self, key, version=-1, lease_ms=30_000):
        self.send(OPEN, 1, payload=struct.pack("<I", len(key)) + key + struct.pack("<qqI", version, lease_ms, 0))
        kind, _, lease, answer = self.receive()
        assert kind == OPENED
        self.lease_ms = struct.unpack_from("<q", answer, 8)[0]
        return lease
