"""Ranks that live but are late are waited for; a line on standard error names them meanwhile."""

import os
import re
import subprocess
import sys

# One device sleeps in the middle of a program. LATE_S is in the environment: longer than two warnings take.
PROGRAM = """
import os, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxcomm

jax.config.update("jax_platforms", "cpu")
if "JAX_NUM_PROCESSES" in os.environ:
    jax.distributed.initialize()
else:
    jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))


def sleep(rank, x):
    if rank == 1:
        time.sleep(float(os.environ["LATE_S"]))
    return x


def body(x):
    y = jaxcomm.pmax(x, "i")
    y = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("i"), x + y)
    return jaxcomm.psum(y, "i")


f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
x = np.array([[1.0], [5.0]], np.float32)
y = f(jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("i")), lambda index: x[index]))
for shard in y.addressable_shards:
    assert np.asarray(shard.data).item() == 16, shard
print("right")
"""


def run(tmp_path, *launcher):
    (tmp_path / "late.py").write_text(PROGRAM)
    ours = ("JAX", "XLA")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"JAXCOMM_WARN_S": "0.4", "LATE_S": "2", "JAXCOMM_CALIBRATION": ""}
    done = subprocess.run(
        [sys.executable, *launcher, "late.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    warnings = re.findall(r"warning: jaxcomm: (psum at late\.py:\d+ \(body\): .*)", done.stderr)
    assert len(warnings) >= 2, done.stderr
    return warnings


def test_late_device_is_waited_for(tmp_path):
    first, second, *_ = run(tmp_path)
    end = " of the first of ranks [0]; an error follows after 600 s (JAXCOMM_TIMEOUT_S)"
    assert first.endswith("ranks [1] did not arrive within 0.4 s (JAXCOMM_WARN_S)" + end)
    assert second.endswith("ranks [1] did not arrive within 0.8 s" + end)


def test_late_process_is_waited_for(tmp_path):
    first, second, *_ = run(tmp_path, "-m", "jaxcomm.run", "--processes", "2", "--devices", "1")
    for warning, time in ((first, "0.4 s (JAXCOMM_WARN_S)"), (second, "0.8 s")):
        assert re.search(
            rf"in the entry barrier, ranks \[0\] .* were not joined within {re.escape(time)} by ranks \[1\]", warning
        )
        assert warning.endswith("; an error follows after 600 s (JAXCOMM_TIMEOUT_S)")
