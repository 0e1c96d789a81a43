"""Sources that die, stop or come back, as processes of their own."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxcomm import transfer

SECRET = "a secret of tests only"
LIMIT_S = 120


@contextlib.contextmanager
def source_job(listen="127.0.0.1:0", version=1, elements=1000):
    arguments = ["trainer", SECRET, listen, str(version), str(elements)]
    job = subprocess.Popen(
        [sys.executable, pathlib.Path(__file__).with_name("source.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield job, job.stdout.readline().strip()
    finally:
        job.kill()
        job.wait()
        job.stdin.close()
        job.stdout.close()


@pytest.fixture
def reader():
    with transfer.Endpoint("reader", secret=SECRET, shared_memory=False) as endpoint:
        yield endpoint


def fetch(reader, address, timeout_s=LIMIT_S, version="latest"):
    return transfer.fetch(reader, transfer.Group(address), "weights", version, None, timeout_s=timeout_s)


def test_a_source_that_is_killed_stopped_or_restarted(reader):
    with source_job() as (job, address):
        assert fetch(reader, address).result()["['w']"].sum() == 1000
        job.send_signal(signal.SIGSTOP)
        os.waitpid(job.pid, os.WUNTRACED)
        with pytest.raises(transfer.TransferTimeout, match=r"'weights' of endpoint 'trainer' .*within 0\.\d+ s"):
            fetch(reader, address, timeout_s=0.5).result()
        job.send_signal(signal.SIGCONT)
        assert fetch(reader, address).result()["['w']"].sum() == 1000, "it was late, not dead"
        job.kill()
        job.wait()
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
    with source_job(elements=25_000_000) as (job, address), source_job(version=3) as (_, other):
        old = fetch(reader, other).result()
        future = fetch(reader, address)
        while reader.stats()["tcp_received_bytes"] < 2**20:
            assert not future.done()
            time.sleep(0.001)
        job.kill()
        began = time.monotonic()
        with pytest.raises(transfer.PeerLost, match=r"version 1 of endpoint 'trainer'.*\(\d+ of 100000000 bytes"):
            future.result()
        assert time.monotonic() - began < 30, "far below timeout_s"
        assert old["['w']"].sum() == fetch(reader, other).result()["['w']"].sum() == 3000


def test_another_secret_and_nobody(reader):
    with transfer.Endpoint("other", secret="not the same secret") as other:
        with pytest.raises(transfer.PeerLost, match=r"endpoint 'other' .*its secret is another one"):
            fetch(reader, other.address).result()
        address = other.address
    with pytest.raises(transfer.PeerLost, match="cannot connect"):
        fetch(reader, address).result()
    for wrong in ("", "127.0.0.1:80", "tcp://127.0.0.1:80/x", "tcp://host:1/x/0123456789abcdef/"):
        with pytest.raises(ValueError, match="no address"):
            fetch(reader, wrong).result()
    with pytest.raises(ValueError, match="at least one address"):
        transfer.Group([])


def test_closing_an_endpoint_ends_what_waits(reader):
    with transfer.Endpoint("source", secret=SECRET) as source:
        transfer.publish(source, "weights", np.zeros(4), 1)
        versions = transfer.watch(reader, transfer.Group(source.address), "weights")
        assert next(versions) == 1
        source.close()
        with pytest.raises(transfer.PeerLost):
            next(versions)
    with pytest.raises(transfer.TransferError):
        fetch(reader, source.address).result()
