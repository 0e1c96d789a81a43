"""Transfers from and to processes of a job."""

import contextlib
import subprocess
import sys

import numpy as np
from jobs import LIMIT_S, SECRET, open_lease
from ranks import environment, free_address

from jaxcomm import transfer

# A fetch by two of the three processes of a job. The first of the two chooses the version.
READS = f"""
import sys
import threading
import jax
import numpy as np
import jaxcomm
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxcomm import transfer

jaxcomm.distributed.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()[1:]), ("i",)), PartitionSpec("i"))
endpoints = [] if jax.process_index() == 0 else [("weights", "missing", "missing", "odd", "busy"), ("weights",)]
for names in endpoints:
    with transfer.Endpoint("reader", secret={SECRET!r}, limits=transfer.Limits(transfers=1)) as reader:
        for name in names:
            free, limit_s = threading.Event(), {LIMIT_S}
            if name == "busy" and jax.process_index() == 1:
                reader._submit(free.wait, None, None)
                limit_s = 0.5
            try:
                found = transfer.fetch(
                    reader, transfer.Group(sys.argv[1]), name, "latest", sharding, timeout_s=limit_s
                ).result()
                said = [shard.data.tolist() for shard in found[""].addressable_shards]
            except transfer.TransferError as error:
                said = f"{{type(error).__name__}} {{error}}"
            free.set()
            print("said", name, said, flush=True)
"""
COLLECTIVE_JOB = f"""
import sys
import jax
import numpy as np
import jaxcomm
from jax.sharding import Mesh, PartitionSpec
from jaxcomm import transfer

jaxcomm.distributed.initialize()
mesh, spec = Mesh(jax.devices(), ("i",)), PartitionSpec("i")
psum = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
assert psum(np.ones(2))[0] == 2
with transfer.Endpoint("trainer", secret={SECRET!r}) as endpoint:
    transfer.publish(endpoint, "weights", {{"w": np.full(9, 1.0)}}, 1)
    print(endpoint.address, flush=True)
    sys.stdin.readline()
    try:
        psum(np.ones(2)).block_until_ready()
    except Exception as error:
        transfer.publish(endpoint, "weights", {{"w": np.full(9, 2.0)}}, 2)
        print(error, flush=True)
    sys.stdin.readline()
"""


def test_all_processes_have_the_error_of_the_one_that_chooses(tmp_path):
    """At once, and the next fetches are right."""
    path = tmp_path / "reads.py"
    path.write_text(READS)
    with transfer.Endpoint("source", secret=SECRET) as source:
        transfer.publish(source, "weights", np.arange(8), 3)
        transfer.publish(source, "odd", np.arange(7), 1)
        command = [sys.executable, "-m", "jaxcomm.run", "-n", "3", "--devices", "1", str(path), source.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, half in (("[1]", [0, 1, 2, 3]), ("[2]", [4, 5, 6, 7])):
        lines = [line for line in done.stdout.splitlines() if line.startswith(rank) and " said " in line]
        said = [line.split(" said ")[1] for line in lines]
        assert said[0] == said[5] == f"weights {[half]}"
        assert all("NotFound jaxcomm.transfer: fetch: 'missing'" in text for text in said[1:3]), said
        assert "TransferTimeout jaxcomm.transfer: fetch: 'busy' of endpoint 'source'" in said[4], said
        assert "waited 0.5 s" in said[4], said
        assert "Refused" in said[3] and "does not fit shape (7,)" in said[3], said


def test_an_endpoint_outlives_the_coordinator_of_its_job(tmp_path):
    """Its collectives fail, but readers that have a lease, and those that come later, get what it publishes."""
    path = tmp_path / "job.py"
    path.write_text(COLLECTIVE_JOB)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(transfer.Endpoint("reader", secret=SECRET))
        coordinator, jobs = free_address(), []
        for rank in range(2):
            variables = environment(rank, 2, coordinator, JAXCOMM_TIMEOUT_S=str(LIMIT_S))
            job = subprocess.Popen([sys.executable, path], env=variables, stdin=-1, stdout=-1, text=True)
            jobs.append(stack.enter_context(job))
            stack.callback(job.kill)
        address = [job.stdout.readline().strip() for job in jobs][1]
        lease = open_lease(reader, address, "weights")
        jobs[0].kill()
        jobs[1].stdin.write("\n")
        jobs[1].stdin.flush()
        assert "process 0" in jobs[1].stdout.readline()
        assert transfer.fetch(reader, transfer.Group(address), "weights", "latest", None).result()["['w']"].sum() == 18
        lease.close()
