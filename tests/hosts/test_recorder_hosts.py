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


SOON = {**LONG, "JAXCOMM_WARN_S": "0.6"}


@pytest.mark.parametrize("fail", [cut, pytest.param(half_open, marks=pytest.mark.full)])
def test_a_link_that_fails(tmp_path, fail):
    """tests/multiprocess/test_recorder_files.py has other causes between hosts."""
    with netns.Hosts(2) as hosts:
        ranks = []
        try:
            for rank in range(2):
                env = environment(rank, 2, f"{hosts.address(0)}:23456", JAXCOMM_RECORDER=str(tmp_path), **SOON)
                command = argv("link_cut_between_collectives")
                ranks.append(Rank(hosts.start(rank, command, env=env, text=True, **netns.PIPES)))
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
                    if (report.verdict, report.findings[0].processes) == ("cut link", (0, 1)):
                        break
                assert time.monotonic() < deadline, str(report)
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.close()
