"""Jobs of one process with an endpoint, which tests stop and kill. They start by fork, so they import nothing anew."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading

import numpy as np

from jaxcomm import transfer
from jaxcomm.transfer import _endpoint, _weights

SECRET = "a secret of tests only"
LIMIT_S = 120
LAYOUT = transfer.PageLayout(layers=2, heads=2, dim=8, dtype=np.int32, page_tokens=4)
LARGE = transfer.PageLayout(layers=2, heads=1, dim=2048, dtype=np.int32, page_tokens=64)  # 1 MiB per page and layer

Context = multiprocessing.get_context("forkserver")
Context.set_forkserver_preload(["jaxcomm.transfer"])


def publisher(pipe, name, listen, version, elements):
    """Publishes an array that is full of its version."""
    with transfer.Endpoint(name, secret=SECRET, listen=listen, shared_memory=False) as endpoint:
        tree = {"w": np.full(elements, version, np.float32)}
        transfer.publish(endpoint, "weights", tree, version)
        pipe.send(endpoint.address)
        pipe.recv()


def replicated():
    return {
        "v": np.arange(1_000_000, dtype=np.int32).reshape(4, -1),
        "w": np.arange(3_000_000, dtype=np.int32)[::-1].reshape(1000, 3000).copy(),
    }


def halves_of(x):
    """The shards of a process that has the first rows and the last ones as two parts."""
    middle = len(x) // 2
    return {((0, 0), (middle, x.shape[1])): x[:middle], ((middle, 0), x.shape): x[middle:]}


def replica(pipe, shards_of=_weights._shards):
    """Publishes arrays that another writer has too."""
    _weights._shards = shards_of  # in this process only
    with transfer.Endpoint("replica", secret=SECRET, shared_memory=False) as endpoint:
        transfer.publish(endpoint, "weights", replicated(), 1)
        pipe.send(endpoint.address)
        pipe.recv()


def large_offer(endpoint, streamed=False):
    """Pages with other numbers in each element and layer."""
    pool = transfer.PagePool(endpoint, LARGE, 2)
    pages = pool.allocate(2)
    for layer, array in enumerate(pool.arrays):
        array[pages] = np.arange(array.size).reshape(array.shape) + layer
    return transfer.offer(pool, pages, streamed=streamed)


def large_prefill(pipe):
    with transfer.Endpoint("prefill", secret=SECRET, shared_memory=False) as endpoint:
        pipe.send(large_offer(endpoint).ticket)
        pipe.recv()


def decode(pipe, shared_memory, lease_s):
    """Pulls a page and waits for its second layer. Sends the error."""
    limits = transfer.Limits(lease_s=lease_s)
    with transfer.Endpoint("decode", secret=SECRET, shared_memory=shared_memory, limits=limits) as endpoint:
        pool = transfer.PagePool(endpoint, LAYOUT, 4)
        pull = transfer.pull(pool, pipe.recv(), pool.allocate(1))
        pull.wait(0, timeout_s=LIMIT_S)
        pipe.send("layer 0")
        try:
            pull.wait(timeout_s=LIMIT_S)
        except transfer.TransferError as error:
            pipe.send((type(error).__name__, str(error)))


def open_lease(reader, address, object="x", version=1):
    wanted = {0: _endpoint.Wanted(address, _endpoint._key_of(object), version)}
    leases, lost = reader._open("test", wanted, _endpoint.Limit(LIMIT_S))
    assert not lost
    return leases[0]


class Calls:
    """A native endpoint, and calls of it, with the limits in seconds of waits, except of those that only look."""

    def __init__(self, native):
        self._native, self.made = native, []

    def __getattr__(self, name):
        return getattr(self._native, name)

    def connect(self, address):
        self.made.append(("connect", address))
        return self._native.connect(address)

    def wait(self, call, left_s, timeout_s):
        self.made += [("wait", left_s)] if left_s else []
        return self._native.wait(call, left_s, timeout_s)

    def of(self, name):
        return [argument for each, argument in self.made if each == name]


class Job:
    def __init__(self, run, *arguments):
        self._pipe, other = Context.Pipe()
        self._process = Context.Process(target=run, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()

    def receive(self):
        assert self._pipe.poll(LIMIT_S), "the job does not answer"
        return self._pipe.recv()

    def send(self, message):
        self._pipe.send(message)

    def stop(self):
        os.kill(self._process.pid, signal.SIGSTOP)
        state = ""
        while state != "T":  # all of its threads have stopped
            with open(f"/proc/{self._process.pid}/stat") as stat:
                state = stat.read().rsplit(")", 1)[1].split()[0]

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.join()

    def join(self):
        self._process.join(LIMIT_S)
        assert self._process.exitcode == 0, f"the job ended with {self._process.exitcode}"
        self.close()

    def close(self):
        self._process.close()
        self._pipe.close()


@contextlib.contextmanager
def job(run, *arguments):
    started = Job(run, *arguments)
    try:
        yield started
    finally:
        started.kill()
        started.close()


@contextlib.contextmanager
def source_job(listen="127.0.0.1:0", version=1, elements=1000):
    with job(publisher, "trainer", listen, version, elements) as started:
        yield started, started.receive()


class Link:
    """A cable to the address of an endpoint, which can be cut and mended. Bytes wait while it is cut.

    The endpoint cuts it by sending `most_bytes`, which a test must wait for before it mends the cable.
    """

    def __init__(self, address, most_bytes=float("inf")):
        scheme, _, where, *rest = address.split("/")
        host, port = where.rsplit(":", 1)
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams = []
        self._most_bytes = most_bytes
        self._answers = threading.Event()
        self._answers.set()
        self.address = "/".join([scheme, "", f"127.0.0.1:{self._listener.getsockname()[1]}", *rest])
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._streams.append(near)
                try:
                    far = socket.create_connection(self._to)
                except OSError:
                    near.close()
                    continue
                self._streams.append(far)
                for way in ((near, far, float("inf"), ()), (far, near, self._most_bytes, [self._answers])):
                    threading.Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(self, source, sink, most_bytes, conditions):
        with contextlib.suppress(OSError):  # a process that was killed may reset its connections
            while data := source.recv(1 << 16):
                for condition in (self._whole, *conditions):
                    condition.wait()
                sink.sendall(data)
                if 0 < most_bytes <= len(data):
                    self.cut()
                most_bytes -= len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def hold_answers(self):
        self._answers.clear()

    def cut(self):
        self._whole.clear()

    def is_cut(self):
        return not self._whole.is_set()

    def mend(self):
        self._whole.set()
        self._answers.set()

    def end_connections(self):
        """What waits never arrives."""
        for each in list(self._streams):  # without those that come meanwhile
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.mend()

    def close(self):
        self.end_connections()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._streams):
            each.close()
