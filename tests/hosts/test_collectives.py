"""Collectives between real network stacks: hosts in network namespaces, connected by links of 1 Gbit/s and 0.2 ms."""

import dataclasses
import json
import os
import pathlib
import sys

import jax
import netns
import pytest
from collectives import FLAT_BYTES, MOE_CALLS, MOE_SIZES, moe_ids

import jaxcomm

RATE_BITS_PER_S, DELAY_S = 1e9, 0.2e-3
CHAIN = 4  # of collectives.py
pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(240),
]


class Run:
    """Runs a script of this folder in all processes; devices[h][p]: number of devices of process p of host h."""

    def __init__(self, hosts, what, devices, script="collectives.py"):
        self.hosts, self.processes = hosts, []
        number = sum(map(len, devices))
        for host, of_host in enumerate(devices):
            for of_process in of_host:
                environment = {
                    **os.environ,
                    "DEVICES": str(of_process),
                    "JAX_COORDINATOR_ADDRESS": f"{hosts.address(0)}:23456",
                    "JAX_NUM_PROCESSES": str(number),
                    "JAX_PROCESS_ID": str(len(self.processes)),
                    "JAXCOMM_NETWORK_DEVICES": "eth0",
                }
                command = [sys.executable, str(pathlib.Path(__file__).with_name(script)), what]
                self.processes.append(hosts.start(host, command, env=environment, text=True, **netns.PIPES))

    def wait_for(self, process=0):
        for line in self.processes[process].stdout:
            if line.startswith("{"):
                return json.loads(line)
        return pytest.fail("".join(p.communicate()[1][-3000:] for p in self.processes))

    def go_on(self):
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def finish(self):
        self.go_on()
        assert [process.wait(200) for process in self.processes] == [0] * len(self.processes)


@pytest.mark.parametrize(
    "devices",
    [[[2], [2]], *(pytest.param(d, marks=pytest.mark.full)
                   for d in ([[2, 2], [2, 2]], [[3], [1, 1]], [[1], [1], [2]]))],
    ids=str,
)  # fmt: skip
def test_values(devices, request, monkeypatch):
    """Equal nodes, unequal nodes, three hosts."""
    monkeypatch.setenv("SIZE", request.config.getoption("--size"))
    with netns.Hosts(len(devices), rate_bits_per_s=RATE_BITS_PER_S, delay_s=DELAY_S) as hosts:
        run = Run(hosts, "values", devices)
        assert run.wait_for()["checked"]
        run.finish()


@pytest.mark.full
@pytest.mark.timing
def test_hierarchy_pays_for_small_messages(capsys):
    with netns.Hosts(2, rate_bits_per_s=RATE_BITS_PER_S, delay_s=DELAY_S) as hosts:
        run = Run(hosts, "small_all_to_all", [[2, 2], [2, 2]])
        seconds = run.wait_for()
        run.finish()
    with capsys.disabled():
        print("\nall_to_all, 256 B a block:", {name: f"{s * 1e6:.0f} us" for name, s in seconds.items()})
    assert seconds["hierarchical"] < seconds["pairwise"]


@pytest.mark.full
@pytest.mark.timing
def test_large_psum_fills_the_link(capsys, monkeypatch, tmp_path):
    # In the format of jaxcomm.calibrate(). The parameters of memory are jaxcomm's constants.
    memory = ["self", 6e-8, 12e9, 0.0], ["node", 6e-8, 12e9, 0.0]
    network = {"links": [*memory, ["network", 50e-6, RATE_BITS_PER_S / 8, DELAY_S]], "launch_s": 15e-6}
    kept = {"format": 2, "processors": len(os.sched_getaffinity(0)), "cost_params": {"network": network}}
    (tmp_path / "cost_params.json").write_text(json.dumps(kept))
    monkeypatch.setenv("JAXCOMM_CALIBRATION", str(tmp_path / "cost_params.json"))
    with netns.Hosts(2, rate_bits_per_s=RATE_BITS_PER_S, delay_s=DELAY_S) as hosts:
        run = Run(hosts, "large_psum", [[2, 2], [2, 2]])
        for process in range(4):
            assert run.wait_for(process) == {"ready": True}
        before = hosts.counters(0)
        run.go_on()
        measured, *_ = [run.wait_for(process)["seconds"] for process in range(4)]
        sent_bytes = (hosts.counters(0).sent_bytes - before.sent_bytes) / (5 * CHAIN)
        run.go_on()
        ring = run.wait_for()["seconds"]
        run.finish()
    plan_bytes = 16 << 20  # each host sends the size of one buffer in total
    ideal_s = plan_bytes * 8 / RATE_BITS_PER_S
    with capsys.disabled():
        print(f"\npsum of 16 MiB: {measured * 1e3:.0f} ms, {measured / ideal_s:.2f} times the link's time; flat ring "
              f"{ring * 1e3:.0f} ms; {sent_bytes / plan_bytes:.3f} times the plan's bytes sent")  # fmt: skip
    assert plan_bytes <= sent_bytes < 1.1 * plan_bytes  # headers of packets, and acknowledgements
    assert measured < 2 * ideal_s  # the measured time is printed above; docs/guide/processes.md quotes it


def predicted_s(op, num_bytes, algorithm, rate_bits_per_s):
    """Time of a plan for 2 nodes of 4 ranks with operands of this size, in the cost model."""
    x = jax.ShapeDtypeStruct((num_bytes,), "int8")
    shape = {"scope": "network", "ranks_per_node": 4, "algorithm": algorithm}
    (network,) = (link for link in jaxcomm.explain(op, x, 8, **shape).links if link.name == "network")
    slow = dataclasses.replace(network, bytes_per_s=rate_bits_per_s / 8, latency_s=DELAY_S)
    return jaxcomm.explain(op, x, 8, links=[slow], **shape).predicted_time_s


# Operations, their operands, and the rings of gloo that XLA:CPU calls for a group of all ranks.
TWO_LEVELS = {
    "psum": (FLAT_BYTES, "psum", FLAT_BYTES),
    "all_gather": (FLAT_BYTES // 8, "all_gather", FLAT_BYTES // 8),
    "pbroadcast": (FLAT_BYTES, "all_gather", FLAT_BYTES),
}


@pytest.mark.full
@pytest.mark.timing
def test_two_levels_of_xla_beat_one(capsys):
    """The link is slow, because the model ignores the copies of gloo inside a process, of about 1 GB/s."""
    rate_bits_per_s = 50e6
    with netns.Hosts(2, rate_bits_per_s=rate_bits_per_s, delay_s=DELAY_S) as hosts:
        run = Run(hosts, "two_levels", [[4], [4]])
        for op, (num_bytes, *flat) in TWO_LEVELS.items():
            seconds, sent = [], []
            for _ in range(2):  # one level, two levels
                assert [run.wait_for(process) for process in range(2)] == [{"ready": True}] * 2
                before = hosts.counters(0).sent_bytes
                run.go_on()
                seconds.append(max(run.wait_for(process)["seconds"] for process in range(2)))
                sent.append((hosts.counters(0).sent_bytes - before) / 3)
                run.go_on()
            predicted = predicted_s(*flat, "ring", rate_bits_per_s)
            predicted /= predicted_s(op, num_bytes, "hierarchical", rate_bits_per_s)
            plan_bytes = num_bytes * (4 if op == "all_gather" else 1)
            with capsys.disabled():
                print(f"\n{op}: {seconds[0] * 1e3:.0f} ms, in two levels {seconds[1] * 1e3:.0f} ms, "
                      f"{seconds[0] / seconds[1]:.2f} times as fast, {predicted:.2f} predicted; "
                      f"{sent[1] / plan_bytes:.3f} times the plan's bytes sent")  # fmt: skip
            assert plan_bytes <= sent[1] < 1.1 * plan_bytes
            assert 0.65 < seconds[0] / seconds[1] / predicted < 1.2
        assert run.wait_for() == {}
        run.finish()


def moe_bytes(ids, hierarchical, hosts=2):
    """Bytes that host 0 sends in a dispatch and a combine with weights, of rows of floats."""
    tokens, choices, experts, width = MOE_SIZES
    n = len(ids) // tokens
    to_host = ids.reshape(n, tokens, choices) // (experts // hosts)
    sent = 0
    for rank in range(n):
        own = rank * hosts // n
        there = to_host[rank] == 1 - own
        entries, rows = int(there.sum()), int(there.any(1).sum())
        if hierarchical:  # rows there or their sums from there; who has the tokens sends lists, and weights
            list_bytes = -(-4 * entries // 64) * 64
            sent += rows * 4 * width + (3 * list_bytes if own == 0 else 0)
        else:
            sent += entries * 4 * width
    return sent


@pytest.mark.full
@pytest.mark.timing
def test_moe_sends_one_row_per_token_and_host(capsys):
    with netns.Hosts(2, rate_bits_per_s=RATE_BITS_PER_S, delay_s=DELAY_S) as hosts:
        run = Run(hosts, "moe_traffic", [[2, 2], [2, 2]])
        seconds = {}
        for algorithm in ("hierarchical", "direct"):
            for process in range(4):
                assert run.wait_for(process) == {"ready": True}
            before = hosts.counters(0).sent_bytes
            run.go_on()
            seconds[algorithm] = max(run.wait_for(process)["seconds"] for process in range(4))
            sent = (hosts.counters(0).sent_bytes - before) / MOE_CALLS
            want = moe_bytes(moe_ids(8), algorithm == "hierarchical")
            with capsys.disabled():
                print(f"\ndispatch and combine, {algorithm}: {seconds[algorithm] * 1e3:.0f} ms, "
                      f"{sent / 1e6:.2f} MB sent, {want / 1e6:.2f} MB of rows and lists")  # fmt: skip
            assert want <= sent < 1.1 * want  # headers of packets, acknowledgements, counts of route
            run.go_on()
        assert run.wait_for() == {}
        run.finish()
    assert seconds["hierarchical"] < seconds["direct"] / 1.8
