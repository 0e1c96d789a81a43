"""Numbers of call sites, if processes compile programs different numbers of times."""

import subprocess
import sys

SCRIPT = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.distributed.initialize()
import jaxcomm

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
rows = np.array([[1.0, 2.0], [10.0, 20.0]], np.float32)
x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("i")), lambda index: rows[index])

def program():
    def body(x):
        return jaxcomm.psum(jaxcomm.psum(x, "i"), "i")  # two sites that differ in nothing
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P()))

for step in range(3):
    if step == 1 and jax.process_index() == 1:
        program().lower(x).compile()
    y = program()(x)
    np.testing.assert_array_equal(np.asarray(y.addressable_data(0)), [[22.0, 44.0]])
print("right", flush=True)
"""


def test_recompilation_in_one_process_keeps_call_sites_matched(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", "2", "--devices", "1", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("right") == 2, done.stderr[-4000:]
