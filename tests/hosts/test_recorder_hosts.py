"""The flight recorder's analysis of failures between hosts, whose processes it cannot see: only their files."""

import time

import netns
import pytest
from ranks import DEADLINE_S, LONG, Rank, argv, environment

from jaxcomm import recorder

pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(300),
]


def cut(hosts):
    hosts.cut(1)


def half_open(hosts):
    """Host 1 receives. What it sends to host 0 goes to an address that no card has."""
    neighbour = ["ip", "neigh", "replace", hosts.address(0), "lladdr", "02:00:00:00:00:99", "dev", "eth0"]
    hosts.run(1, [*neighbour, "nud", "permanent"])


def no_fault(hosts):
    pass  # the processes do it


# Failure, scenario of failing.py, verdict, processes that cause it.
TABLE = [
    (cut, "link_cut_between_collectives", "cut link", (0, 1)),
    pytest.param(half_open, "link_cut_between_collectives", "cut link", (0, 1), marks=pytest.mark.full),
    pytest.param(no_fault, "killed_in_a_collective", "process dead", (1,), marks=pytest.mark.full),
    pytest.param(no_fault, "killed_between_collectives", "process dead", (1,), marks=pytest.mark.full),
    pytest.param(no_fault, "stopped", "stuck outside a collective", (1,), marks=pytest.mark.full),
    pytest.param(no_fault, "different_ops", "other call", (0, 1), marks=pytest.mark.full),
    pytest.param(no_fault, "another_version", "other version", (0, 1), marks=pytest.mark.full),
]
SOON = {**LONG, "JAXCOMM_WARN_S": "0.6"}


@pytest.mark.parametrize("fail, scenario, verdict, processes", TABLE)
def test_verdict(tmp_path, fail, scenario, verdict, processes):
    with netns.Hosts(2) as hosts:
        ranks = []
        try:
            for rank in range(2):
                env = environment(rank, 2, f"{hosts.address(0)}:23456", JAXCOMM_RECORDER=str(tmp_path), **SOON)
                ranks.append(Rank(hosts.start(rank, argv(scenario), env=env, text=True, **netns.PIPES)))
            if fail is not no_fault:
                for rank in ranks:
                    rank.wait_for("ready")
                fail(hosts)
                for rank in ranks:
                    rank.go_on()
            deadline = time.monotonic() + DEADLINE_S
            while True:
                try:
                    report = recorder.analyze(tmp_path, window_s=2.0)
                except FileNotFoundError as error:
                    report = error
                else:
                    if (report.verdict, report.findings[0].processes) == (verdict, processes):
                        break
                assert time.monotonic() < deadline, str(report)
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.close()
