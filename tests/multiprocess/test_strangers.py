"""Unauthenticated connections: they do not affect a program, and a warning counts them."""

import json
import os
import re
import socket

import pytest
from ranks import ROUNDS, analyzed, finish

pytestmark = [pytest.mark.deadline(300), pytest.mark.parametrize("round_", ROUNDS)]

GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # begin of a TLS handshake
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    b"\xff" * 100_000,
    bytes(100_000),
)


def disturb(family, address, port):
    """Sends a port scan, garbage and resets. Returns sockets that stay open with little or no data."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address).removeprefix("::ffff:")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    half_open = []
    for data in (*GARBAGE, os.urandom(1 << 16)):
        for stays in (False, True):
            stranger = socket.socket(family)
            stranger.settimeout(0.2)
            try:
                stranger.connect((address, port))
                stranger.sendall(data[:7] if stays else data)
            except OSError:  # the process has closed the connection
                stranger.close()
                continue
            half_open.append(stranger) if stays else stranger.close()
    return half_open


def test_unknown_clients_change_nothing(start, round_):
    ranks = start("watched_by_strangers", 2, nodes="ab")
    said = [rank.wait_for("listens") for rank in ranks]
    half_open = []
    for one in said:
        assert one["ports"]
        for port in one["ports"]:
            assert port[1] not in ("0.0.0.0", "::"), one  # the interfaces in use, no others
            half_open += disturb(*port)
    addresses = json.dumps([one["address"] for one in said])
    forgers = start("has_another_token", 2, nodes="ab", REAL_ADDRESSES=addresses)
    for forger in forgers:
        for call in ("psum at failing.py:", "psum at failing.py:", "reshard at jaxcomm.reshard"):
            assert call in forger.wait_for("error")["text"]
    analyzed(forgers, ("cut link", (0, 1), (2, 3), "gets nothing from process 1"))  # their messages are refused
    finish(forgers)
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        assert rank.wait_for("right")["rounds"] > 10
    finish(ranks)
    for stranger in half_open:
        stranger.close()
    for number, rank in enumerate(ranks):
        warnings = re.findall(
            r"jaxcomm: process (\d) has dropped (\d+) message\(s\) that do not belong to this job", "".join(rank.errors)
        )
        assert warnings and all(int(process) == number for process, _ in warnings), rank.errors
        assert len(warnings) < int(warnings[-1][1]), "not one for each message, as often as the test is slow"
