"""Processes on this host that run failing.py."""

import os
import pathlib
import subprocess
import tempfile

import pytest
from ranks import PIPES, Rank, argv, environment, free_address


def shared_files():
    """Files of programs other than Open MPI, which other tests may run at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sm_segment.")}


@pytest.fixture
def start(tmp_path):
    """Starts processes, whose recorder writes to a folder of their own."""
    ranks = []

    def start(scenarios, processes, nodes="", **more):
        address, started, folder = free_address(), [], pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
        for rank in range(processes):
            node = {"JAXCOMM_NODE_ID": nodes[rank]} if nodes else {}
            env = environment(rank, processes, address, JAXCOMM_RECORDER=str(folder), **node, **more)
            process = subprocess.Popen(argv(scenarios), env=env, text=True, start_new_session=True, **PIPES)
            started.append(Rank(process, folder))
        ranks.extend(started)
        return started

    before = shared_files()
    yield start
    for rank in ranks:
        rank.close()
    assert shared_files() <= before
