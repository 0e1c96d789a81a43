"""Programs compiled again, by one process more often, with a persistent cache whose entries only process 0 finds."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import jaxcomm

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))
x = np.arange(8, dtype=np.float32).reshape(4, 2)
placed = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index])
for round in range(3):
    for _ in range(1 + (round == 1 and jax.process_index() == 1)):
        # The two sites of psum differ in nothing.
        calls = lambda x: jaxcomm.psum(jaxcomm.psum(x, "i"), "i") + jaxcomm.pmax(x, "i")
        f = jax.shard_map(calls, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        f = jax.jit(f).lower(placed).compile()
    for shard in f(placed).addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data)[0], 4 * x.sum(0) + x.max(0))
    jax.clear_caches()
print("right")
"""


@pytest.mark.deadline(400)
def test_processes_that_compile_again(tmp_path):
    (tmp_path / "again.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAXCOMM_TIMEOUT_S": "60",
        "JAXCOMM_CALIBRATION": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "jaxcomm.run", "--processes", "2", "--devices", "2", "again.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=350,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 2
    assert done.stderr.count("JAX's persistent compilation cache is switched off") == 2
