"""Jobs on hosts of netns: endpoints, whose functions run there. They start by fork, as tests/transfer/jobs.py."""

import ctypes
import os

import numpy as np
from jobs import LAYOUT, LIMIT_S, SECRET

from jaxcomm import transfer

CLONE_NEWNET = 0x40000000


def endpoint_on(pipe, pid, name, host, limits):
    """Enters the network of a host, and runs functions of the endpoint there."""
    with open(f"/proc/{pid}/ns/net") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), CLONE_NEWNET) == 0
    with transfer.Endpoint(name, secret=SECRET, listen=f"{host}:0", limits=limits) as endpoint:
        pipe.send(endpoint.address)
        while True:
            run, *arguments = pipe.recv()
            try:
                pipe.send(run(endpoint, *arguments))
            except transfer.TransferError as error:
                pipe.send((type(error).__name__, str(error)))


kept = []  # of the job


def publish(endpoint, version, elements):
    transfer.publish(endpoint, "weights", np.full(elements, version, np.float32), version)


def fetch(endpoint, address, timeout_s=LIMIT_S):
    future = transfer.fetch(endpoint, transfer.Group(address), "weights", "latest", None, timeout_s=timeout_s)
    return float(future.result()[""].sum())


def start_fetch(endpoint, address):
    kept.append(transfer.fetch(endpoint, transfer.Group(address), "weights", "latest", None, timeout_s=LIMIT_S))


def end_fetch(endpoint):
    return float(kept.pop().result()[""].sum())


def offer(endpoint):
    """A page whose second layer is never ready."""
    pool = transfer.PagePool(endpoint, LAYOUT, 4)
    pages = pool.allocate(1)
    pool.arrays[0][pages] = 1
    offered = transfer.offer(pool, pages, streamed=True)
    offered.mark_ready(0)
    kept.append(offered)
    return offered.ticket


def is_done(endpoint):
    return kept[0].done


def pull(endpoint, ticket):
    pool = transfer.PagePool(endpoint, LAYOUT, 4)
    pages = pool.allocate(1)
    kept.append(transfer.pull(pool, ticket, pages))
    kept[-1].wait(0, timeout_s=LIMIT_S)
    return int(pool.arrays[0][pages].sum())


def watch(endpoint, address):
    versions = transfer.watch(endpoint, transfer.Group(address), "weights")
    return [next(versions), next(versions)]


def stats(endpoint):
    return endpoint.stats()


def sockets(endpoint):
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith("socket:") for name in names if os.path.islink(name))
