"""Collectives between real network stacks: hosts in network namespaces, connected by links of 1 Gbit/s and 0.2 ms."""

import json
import pathlib
import sys

import netns
import pytest
import ranks

PROGRAM = str(pathlib.Path(__file__).with_name("collectives.py"))
pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(240),
]


@pytest.mark.parametrize(
    "devices",
    [[[2], [2]], *(pytest.param(d, marks=pytest.mark.full)
                   for d in ([[2, 2], [2, 2]], [[3], [1, 1]], [[1], [1], [2]]))],
    ids=str,
)  # fmt: skip
def test_values(devices, request):
    """Equal nodes, unequal nodes, three hosts. devices[h][p]: number of devices of process p of host h."""
    with netns.Hosts(len(devices), rate_bits_per_s=1e9, delay_s=0.2e-3) as hosts:
        processes = []
        for host, of_process in ((host, of_process) for host, all_ in enumerate(devices) for of_process in all_):
            rank, more = len(processes), {"SIZE": request.config.getoption("--size"), "JAXCOMM_TIMEOUT_S": "60"}
            more |= {"DEVICES": str(of_process), "JAXCOMM_NETWORK_DEVICES": "eth0"}
            env = ranks.environment(rank, sum(map(len, devices)), f"{hosts.address(0)}:23456", **more)
            processes.append(hosts.start(host, [sys.executable, PROGRAM], env=env, text=True, **netns.PIPES))
        outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "".join(o[1][-3000:] for o in outputs)
    (said,) = (json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{"))
    assert said["checked"]
