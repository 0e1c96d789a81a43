"""Saves a checkpoint on one mesh and restores it on another: restoring.py <folder>. Prints the bytes that it reads."""

import json
import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.lm import comm, distributed
from models.tp.parallel import Config


def read_bytes():
    """Of all files, by tensorstore's own counter."""
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


distributed.initialize()
rng = np.random.default_rng(0)
x = {
    "kernels": [rng.standard_normal((256, 512), np.float32) for _ in range(8)],
    "odd": rng.standard_normal((255, 511), np.float32),  # no dimension of which eight devices get equal parts
    "count": np.int32(7),
}
devices = np.array(jax.devices())
saved, wanted = (
    NamedSharding(Mesh(of, ("a", "b")), P()) for of in (devices.reshape(2, 4), devices[::-1].reshape(4, 2))
)


def shardings(whole, spec):
    return {"kernels": [whole.update(spec=spec)] * 8, "odd": whole, "count": whole}


given, targets = shardings(saved, P("a", "b")), shardings(wanted, P(None, "a"))
folder = pathlib.Path(sys.argv[1])
with ocp.CheckpointManager(folder) as checkpoints:
    checkpoints.save(0, args=ocp.args.PyTreeSave(jax.tree.map(distributed.put, x, given)))
    checkpoints.wait_until_finished()
    before = read_bytes()
    found = distributed.restore(checkpoints, 0, x, targets, comm.load(Config(comm="jaxcomm")))
    said = {"read": read_bytes() - before, "saved": sum(f.stat().st_size for f in folder.glob("0/**/d/*"))}
for array, sharding, whole in zip(*map(jax.tree.leaves, (found, targets, x)), strict=True):
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
print(json.dumps(said))
