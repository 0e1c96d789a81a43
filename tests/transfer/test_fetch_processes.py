"""Transfers to processes of a job."""

import subprocess
import sys

import numpy as np
from jobs import LIMIT_S, SECRET

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
