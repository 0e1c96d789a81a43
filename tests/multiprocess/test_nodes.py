"""Nodes of processes, and meshes that follow nodes."""

import json
import os
import subprocess
import sys

import pytest

from jaxcomm._processes import placement

SCRIPT = """
import json, jax
jax.distributed.initialize()
import jaxcomm
mesh = jaxcomm.make_mesh((2, 4), ("node", "gpu"))
topology = jaxcomm.topology()
if jax.process_index() == 0:
    rows = [[device.process_index for device in row] for row in mesh.devices]
    print(json.dumps({"nodes": topology.nodes, "ranks": topology.ranks, "rows": rows}))
    assert "2 node(s), 8 rank(s)" in str(topology)
"""


@pytest.mark.parametrize("ids", ["abab", *(pytest.param(x, marks=pytest.mark.full) for x in ("aabb", "baba"))])
def test_inner_axis_of_a_mesh_stays_in_a_node(ids, tmp_path):
    script = tmp_path / "script.py"
    # Each process sets its own node.
    script.write_text(
        f"import os\nos.environ['JAXCOMM_NODE_ID'] = {ids!r}[int(os.environ['JAX_PROCESS_ID'])]\n{SCRIPT}"
    )
    command = [sys.executable, "-m", "jaxcomm.run", "--processes", "4", "--devices", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env={**os.environ})
    assert done.returncode == 0, done.stderr
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[0] {"))[4:])
    assert said["ranks"] == [4, 4]
    assert said["nodes"] == ([[0, 1], [2, 3]] if ids == "aabb" else [[0, 2], [1, 3]])
    for row, processes in zip(said["rows"], said["nodes"], strict=True):
        assert set(row) == set(processes)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("aabb", 2), ("aaaa", 4), ("abab", 1), ("aaab", 1), ("abcd", 1), ("aabbaa", 1), ("a", 1), ("aabbcc", 2)],
)
def test_ranks_per_node_of_a_group(nodes, expected):
    assert placement.ranks_per_node(nodes) == expected
