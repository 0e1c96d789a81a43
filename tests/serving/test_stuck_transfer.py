"""A collective that waits for a rank whose data wait for another endpoint: the report names the endpoints."""

import os
import re
import subprocess
import sys

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import jaxcomm
from jaxcomm import transfer

jax.config.update("jax_num_cpu_devices", 2)
layout = transfer.PageLayout(layers=1, heads=2, dim=4, dtype=np.float32)
prefill, decode = (transfer.Endpoint(name, secret="secret of the tests") for name in ("prefill", "decode"))
pools = [transfer.PagePool(endpoint, layout, 2) for endpoint in (prefill, decode)]
pages = [pool.allocate(1) for pool in pools]
offer = transfer.offer(pools[0], pages[0], streamed=True)
pull = transfer.pull(pools[1], offer.ticket, pages[1])

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def load(rank):
    if rank == 1:
        pull.wait(timeout_s=300)
    return np.float32(0)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(), check_vma=False)
def step(x):
    data = jax.pure_callback(load, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("i"))
    return jaxcomm.psum(x + data, "i")


loss = step(jnp.ones(2))
deadline = time.monotonic() + 60
seen = None  # earlier: rank 0 has not come yet, or the process, which may be busy, has written no stacks
while seen != ("stuck in a transfer", (1,)) and time.monotonic() < deadline:
    report = jaxcomm.recorder.analyze(sys.argv[1], window_s=0.5)
    seen = report.verdict, report.findings[0].behind
print(report.verdict, "|", *report.findings[0].lines)
offer.mark_ready(0)
print(loss.block_until_ready())
for endpoint in (decode, prefill):
    endpoint.close()
"""


def test_the_report_names_the_endpoint(tmp_path):
    environment = os.environ | {"JAXCOMM_RECORDER": str(tmp_path)}
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    cause, sum_of_ranks = run.stdout.splitlines()
    endpoint = r"endpoint 'prefill' \(incarnation \w+, [\d.:]+\)"
    wait = rf"process 0: endpoint 'decode' waits: read of a ticket at {endpoint}: [\d.]+ s, 0 of 1024 bytes"
    assert re.match(rf"stuck in a transfer \| {wait} ranks \[1\] of process 0 did not arrive", cause), cause
    assert sum_of_ranks == "[2.]"
