"""Failures between hosts: two namespaces of two processes with two devices each, joined by a link of 1 Gbit/s.

The programs are those of tests/multiprocess. `make stress` repeats every test.
"""

import re
import time

import netns
import pytest
from ranks import LONG, LONGER, PROMPT_S, ROUNDS, SHORT, Rank, argv, environment, finish

ON_EACH = 2  # processes
pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(300),
    pytest.mark.parametrize("round_", ROUNDS),
]


@pytest.fixture
def hosts():
    """Ends with nothing left in /dev/shm."""
    with netns.Hosts(2, rate_bits_per_s=1e9, delay_s=0.2e-3) as hosts:
        for host in range(hosts.num_hosts):
            fill = "mount -o remount,size=64k /dev/shm && ! head -c 100000 /dev/zero 2> /dev/null > /dev/shm/full"
            hosts.run(host, ["sh", "-c", fill])
        yield hosts


@pytest.fixture
def start(hosts):
    ranks = []

    def start(scenarios, **more):
        processes = hosts.num_hosts * ON_EACH
        for rank in range(processes):
            env = environment(rank, processes, f"{hosts.address(0)}:23456", **more)
            ranks.append(Rank(hosts.start(rank // ON_EACH, argv(scenarios), env=env, text=True, **netns.PIPES)))
        return ranks

    yield start
    for host in range(hosts.num_hosts):  # each has its own
        assert hosts.run(host, ["ls", "/dev/shm"]) == "full\n"
    for rank in ranks:
        rank.close()


def check(text, *parts, call=r"psum at failing.py:\d+ \(.+?\)"):
    """Checks that the error names op, call site and phase."""
    assert re.search(call + r": (in the entry barrier|while running|in the exit barrier), ", text), text
    for part in parts:
        assert part in text, text


@pytest.mark.full
@pytest.mark.parametrize(
    ("scenario", "errors", "options"),
    [("killed_in_a_collective", 1, {}), ("killed_while_large_data_move", 1, {}), ("killed_between_collectives", 2, {}),
     ("killed_while_reshard_runs", 1, {"call": "reshard at jaxcomm.reshard"})],
)  # fmt: skip
def test_process_that_is_killed(start, scenario, errors, options, round_):
    *survivors, victim = start(scenario, **LONG)
    killed = victim.wait_for("acts")["at"]
    for rank in survivors:
        for _ in range(errors):
            error = rank.wait_for("error")
            check(error["text"], "[6, 7] (process 3)", **options)
            assert error["at"] - killed < PROMPT_S
        rank.wait_for("survivors work")
    finish(survivors)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param("link_cut_while_large_data_move", marks=pytest.mark.full),
     pytest.param("link_cut_while_reshard_runs", marks=pytest.mark.full), "link_cut_between_collectives"],
)  # fmt: skip
def test_link_that_is_cut_and_mended(hosts, start, scenario, round_):
    between = scenario == "link_cut_between_collectives"
    ranks = start(scenario, **(SHORT if between else LONGER))
    if not between:
        for rank in ranks:
            rank.wait_for("runs")
        for rank in ranks:
            rank.go_on()
    for rank in ranks:
        rank.wait_for("ready")
    hosts.cut(1)
    began = time.monotonic()
    if between:
        for rank in ranks:
            rank.go_on()
    texts = []
    call = {"call": "reshard at jaxcomm.reshard"} if "reshard" in scenario else {}
    for rank in ranks:
        for _ in range(2 if between else 1):
            texts.append(rank.wait_for("error")["text"])
            check(texts[-1], **call)
        rank.wait_for("host works")
    # Errors of each host name the other one as the cause. A process may also wait for its neighbour, whose own wait may
    # end later on a busy machine if both have begun before the cut.
    half = len(texts) // 2
    sides = (texts[:half], r"\(process [23]\)"), (texts[half:], r"\(process [01]\)")
    named = [any(re.search(others, text) for text in own) for own, others in sides]
    assert all(named) if between else any(named), texts
    hosts.restore(1)
    time.sleep(time.monotonic() - began)  # TCP doubles the time between its retries
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        rank.wait_for("works again")
    finish(ranks)
