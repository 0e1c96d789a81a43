"""jaxcomm.transfer between jobs on two hosts: network namespaces, whose link is cut and mended."""

import contextlib
import pathlib
import sys

import netns
import pytest

from jaxcomm import transfer

sys.path.append(str(pathlib.Path(__file__).parents[1] / "transfer"))

import transfer_jobs as run
from jobs import LIMIT_S, job
from test_weights import wait_until

LIMITS = transfer.Limits(lease_s=1.0, max_lease_s=2.0)
pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(300),
]


class Job:
    def __init__(self, job):
        self._job = job
        self.kill = job.kill
        self.address = job.receive()

    def start(self, *call):
        self._job.send(call)

    def end(self):
        return self._job.receive()

    def __call__(self, *call):
        self.start(*call)
        return self.end()


@pytest.fixture
def on():
    """Starts an endpoint on a host. `on.hosts` are the hosts."""
    with netns.Hosts(2, rate_bits_per_s=2e8) as hosts, contextlib.ExitStack() as stack:

        def on(host, name, limits=LIMITS):
            pid = hosts._pids[host]
            return Job(stack.enter_context(job(run.endpoint_on, pid, name, hosts.address(host), limits)))

        on.hosts = hosts
        yield on


def test_a_link_that_is_cut_and_mended(on):
    """A fetch in the middle goes on; one with a short limit ends at it; nobody is dead."""
    source, reader = on(0, "trainer", transfer.Limits()), on(1, "generator", transfer.Limits())
    source(run.publish, 1, 1000)
    assert reader(run.fetch, source.address) == 1000
    assert reader(run.pull, source(run.offer)) == 128
    source(run.publish, 2, 10_000_000)
    reader.start(run.start_fetch, source.address)
    reader.end()
    wait_until(lambda: reader(run.stats)["tcp_received_bytes"] > 2**20, LIMIT_S)
    on.hosts.cut(1)
    kind, text = reader(run.fetch, source.address, 1.0)
    assert kind == "TransferTimeout" and "of endpoint 'trainer'" in text and "within 1 s" in text
    assert reader(run.stats)["tcp_received_bytes"] < 4e7
    on.hosts.restore(1)
    assert reader(run.end_fetch) == 20_000_000
    source(run.publish, 3, 1000)
    assert reader(run.fetch, source.address) == 3000
    found = reader(run.stats)
    assert found["tcp_received_bytes"] > 4e7 and found["shared_memory_received_bytes"] == 0


def test_a_reader_whose_host_vanishes(on):
    source, reader = on(0, "prefill"), on(1, "decode")
    before = source(run.sockets)
    reader(run.pull, source(run.offer))
    reader.start(run.watch, source.address)
    assert source(run.sockets) == before + 1
    on.hosts.cut(1)
    reader.kill()  # the end of the connection does not arrive
    wait_until(lambda: source(run.is_done), LIMIT_S)
    wait_until(lambda: source(run.sockets) == before, LIMIT_S)
    found = source(run.stats)
    assert found["leases"] == 0 and found["leases_expired"] == 1


def test_a_source_whose_host_vanishes_and_starts_on_another_one(on):
    reader, source = on(0, "generator"), on(1, "trainer")
    before = reader(run.sockets)
    source(run.publish, 1, 1000)
    assert reader(run.fetch, source.address) == 1000
    reader.start(run.watch, source.address)
    on.hosts.cut(1)
    source.kill()
    kind, text = reader.end()
    assert kind == "PeerLost" and "watch: 'weights' of endpoint 'trainer' (incarnation" in text
    assert reader(run.sockets) == before
    kind, text = reader(run.fetch, source.address)
    assert kind == "PeerLost" and "it does not answer" in text
    new = on(0, "trainer")
    new(run.publish, 2, 1000)
    assert reader(run.fetch, new.address) == 2000
