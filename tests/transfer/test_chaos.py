"""Random offers, pulls, cancels, revocations, stops and kills between processes, with a check of every byte shown."""

import collections
import contextlib
import itertools
import os
import random
import re
import threading
import time
from multiprocessing import forkserver

import numpy as np
import pytest
from jobs import LIMIT_S, SECRET, Job

from jaxcomm import transfer

LEASE_S = 2.0  # a ticket that nobody uses
PAGES = 32
NUM_READERS, NUM_SOURCES = 4, 2
LAYOUTS = {
    "small": transfer.PageLayout(layers=2, heads=2, dim=8, dtype=np.int32, page_tokens=4),
    "large": transfer.PageLayout(layers=2, heads=8, dim=64, dtype=np.int32, page_tokens=32),  # 128 KiB
}
GONE = -7  # content of pages that nobody may see any more


def content(layout, layer, salt, count):
    size = int(np.prod(layout.shape(count)))
    return (np.arange(size, dtype=np.int32) % 8191 + salt * 9973 + layer * 17).reshape(layout.shape(count))


def serve(pipe, name, shared_memory, seed):
    """A source. Answers each request with one message, and takes offers back at random."""
    pick = random.Random(seed)
    with transfer.Endpoint(name, secret=SECRET, shared_memory=shared_memory) as endpoint:
        pools = {kind: transfer.PagePool(endpoint, layout, PAGES * NUM_READERS) for kind, layout in LAYOUTS.items()}
        live = []  # pool, pages, offer, when it is taken back
        pipe.send(endpoint.address)
        while True:
            for each in list(live):
                pool, pages, offer, until = each
                if time.monotonic() > until:
                    offer.revoke()
                if offer.done:
                    for array in pool.arrays:
                        array[pages] = GONE
                    pool.free(pages)
                    live.remove(each)
            if not pipe.poll(0.001 if live else 1.0):
                continue
            request = pipe.recv()
            if request is None:
                return
            if request == "idle":
                pipe.send((not live, [pool.num_free for pool in pools.values()], endpoint.stats()["leases"]))
                continue
            kind, count, salt, reader, revoked, streamed = request
            pool, layout = pools[kind], LAYOUTS[kind]
            if count > pool.num_free:  # tickets that nobody uses hold pages until their leases end
                pipe.send(None)
                continue
            pages = pool.allocate(count)
            if not streamed:
                for layer, array in enumerate(pool.arrays):
                    array[pages] = content(layout, layer, salt, count)
            offer = transfer.offer(pool, pages, reader=reader, lease_s=LEASE_S, streamed=streamed)
            until = time.monotonic() + pick.uniform(0, 0.005) if revoked else float("inf")
            live.append((pool, pages, offer, until))
            pipe.send(offer.ticket)
            for layer, array in enumerate(pool.arrays if streamed else []):
                array[pages] = content(layout, layer, salt, count)
                offer.mark_ready(layer)


class Source:
    """A source process, and one of the same name after it was killed."""

    def __init__(self, number):
        self.name, self._number, self._lock = f"prefill-{number}", number, threading.Lock()
        self.kills = 0
        self._start()

    def _start(self):
        self._job = Job(serve, self.name, self._number % 2 == 0, self.kills)
        self._job.receive()

    def ask(self, request):
        with self._lock:
            self._job.send(request)
            return self._job.receive()

    def kill(self):
        with self._lock:
            self.kills += 1  # before anybody notices
            self._job.kill()
            self._job.close()
            self._start()

    def stop(self):
        with self._lock:
            self._job.stop()
            time.sleep(0.02)
            self._job.go_on()

    def end(self):
        self._job.send(None)
        self._job.join()


# What a reader does with a ticket, how often in a hundred, and the errors that this may raise besides PeerLost.
ACTIONS = {
    "wait": (63, ()),
    "layer by layer": (10, ()),
    "revoked": (12, (transfer.Revoked, transfer.VersionGone, transfer.NotFound)),
    "cancel": (10, (transfer.Cancelled,)),
    "no time": (4, (transfer.TransferTimeout,)),
    "not used": (1, ()),
}


class Reader:
    def __init__(self, number, seed, sources):
        self.name = f"decode-{number}"
        self._endpoint = transfer.Endpoint(self.name, secret=SECRET, shared_memory=number % 2 == 0)
        self._pools = {kind: transfer.PagePool(self._endpoint, layout, PAGES) for kind, layout in LAYOUTS.items()}
        self._pick, self._sources = random.Random(f"{seed}-{number}"), sources
        self._salts = itertools.count(number, NUM_READERS)
        self.results = collections.Counter()

    def round(self):
        pick, source = self._pick, self._pick.choice(self._sources)
        kind, salt = pick.choices(list(LAYOUTS), [9, 1])[0], next(self._salts) % 100_000
        count = pick.randint(1, PAGES // 2)
        action = pick.choices(list(ACTIONS), [share for share, _ in ACTIONS.values()])[0]
        may_read, streamed = pick.choice(["", self.name]), pick.random() < 0.3
        before, asked = source.kills, time.monotonic()
        while (ticket := source.ask((kind, count, salt, may_read, action == "revoked", streamed))) is None:
            time.sleep(0.01)
            asked = time.monotonic()
        if action == "not used":
            self.results[action] += 1
            return
        pool = self._pools[kind]
        pages = pool.allocate(count)
        for array in pool.arrays:
            array[pages] = -1
        try:
            self._pull(action, pool, ticket, pages)
            for layer, array in enumerate(pool.arrays):
                want = content(LAYOUTS[kind], layer, salt, count)
                np.testing.assert_array_equal(array[pages], want, f"{action}: a wrong byte from {source.name}")
            self.results[action] += 1
        except transfer.TransferError as error:
            allowed = ACTIONS[action][1]
            if source.kills != before:
                allowed = (*allowed, transfer.PeerLost)
            if time.monotonic() - asked >= LEASE_S:  # on a slow machine
                allowed = (*allowed, transfer.NotFound)
            if not isinstance(error, allowed):
                raise
            assert re.search(f"endpoint '{source.name}'", str(error)), f"the error names another endpoint: {error}"
            self.results[f"{action}: {type(error).__name__}"] += 1
        finally:
            pool.free(pages)

    def _pull(self, action, pool, ticket, pages):
        pull = transfer.pull(pool, ticket, pages, timeout_s=LIMIT_S)
        if action == "cancel":
            time.sleep(self._pick.choice([0, 0, self._pick.uniform(0, 0.003)]))
            pull.cancel()
        elif action == "no time":
            pull.wait(timeout_s=self._pick.uniform(0, 0.001))
        elif action == "layer by layer":
            for layer in reversed(range(pool.layout.layers)):
                pull.wait(layer, timeout_s=LIMIT_S)
        pull.wait(timeout_s=LIMIT_S)

    def end(self):
        leaked = {kind: PAGES - pool.num_free for kind, pool in self._pools.items()}
        assert not any(leaked.values()), f"{self.name} leaks pages: {leaked}"
        self._endpoint.close()


def descriptors():
    """What each file descriptor of this process is."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return links


def run(rounds, seed=0):
    """Returns how often each action ended in which way."""
    forkserver.ensure_running()
    before = descriptors()
    pick = random.Random(seed)
    sources = [Source(number) for number in range(NUM_SOURCES)]
    readers = [Reader(number, seed, sources) for number in range(NUM_READERS)]
    left, errors, stop = itertools.count(), [], threading.Event()

    def work(reader):
        try:
            while next(left) < rounds and not errors:
                reader.round()
        except BaseException as error:
            errors.append(error)

    def disturb():
        for act in itertools.cycle([Source.kill, Source.stop]):
            act(pick.choice(sources))
            if stop.wait(pick.uniform(0.1, 0.6)):
                return

    threads = [threading.Thread(target=work, args=(reader,)) for reader in readers]
    disturber = threading.Thread(target=disturb)
    for thread in (*threads, disturber):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    disturber.join()
    if errors:
        raise errors[0]
    idle = (True, [PAGES * NUM_READERS] * len(LAYOUTS), 0)
    for source in sources:
        deadline = time.monotonic() + LIMIT_S
        while (state := source.ask("idle")) != idle:  # the last leases end with a message of their readers
            assert time.monotonic() < deadline, f"{source.name} leaks: {state}"
            time.sleep(0.01)
    for each in (*readers, *sources):
        each.end()
    results = sum((reader.results for reader in readers), collections.Counter())
    results["kills"] = sum(source.kills for source in sources)
    assert descriptors() == before, f"file descriptors leak: {before} became {descriptors()}"
    return results


@pytest.mark.parametrize("rounds", [400, pytest.param(100_000, marks=pytest.mark.stress)])
def test_no_wrong_byte_and_no_leaked_page(rounds):
    results = run(rounds)
    assert results.total() - results["kills"] == rounds
    assert results["wait"] > rounds // 4 and results["kills"] > 0
