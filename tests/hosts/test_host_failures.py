"""Failures between hosts: two namespaces of two processes with two devices each, joined by a link of 1 Gbit/s.

The programs are those of tests/multiprocess. `make stress` repeats every test.
"""

import re
import signal
import time

import netns
import pytest
from ranks import LONG, LONGER, PROMPT_S, ROUNDS, SHORT, SHORT_S, SLACK_S, Rank, argv, environment, finish

RATE_BITS_PER_S, DELAY_S = 1e9, 0.2e-3
ON_EACH = 2  # processes
pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(300),
    pytest.mark.parametrize("round_", ROUNDS),
]


@pytest.fixture
def hosts():
    """Ends with nothing left in /dev/shm."""
    with netns.Hosts(2, rate_bits_per_s=RATE_BITS_PER_S, delay_s=DELAY_S) as hosts:
        for host in range(hosts.num_hosts):
            fill = "mount -o remount,size=64k /dev/shm && ! head -c 100000 /dev/zero 2> /dev/null > /dev/shm/full"
            hosts.run(host, ["sh", "-c", fill])
        yield hosts


@pytest.fixture
def start(hosts):
    ranks = []

    def start(scenarios, on_each=ON_EACH, **more):
        processes = hosts.num_hosts * on_each
        for rank in range(processes):
            env = environment(rank, processes, f"{hosts.address(0)}:23456", **more)
            ranks.append(Rank(hosts.start(rank // on_each, argv(scenarios), env=env, text=True, **netns.PIPES)))
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


@pytest.mark.full
@pytest.mark.parametrize("on_each", [1, ON_EACH])
def test_routing_that_is_wrong_on_one_rank(start, round_, on_each):
    """Processes of both hosts get the error of the one that finds it, long before the limit.

    With one process on a host, no other process there can pass the error on.
    """
    began = time.monotonic()
    for rank in (ranks := start("wrong_routing", on_each, **LONG)):
        assert "does not belong to this rank" in (error := rank.wait_for("error"))["text"]
        assert error["at"] - began < PROMPT_S + SLACK_S
        rank.wait_for("all work")
    finish(ranks)


@pytest.mark.full
def test_process_that_is_stopped_and_goes_on(start, round_):
    *others, victim = ranks = start("stopped works_again", **SHORT)
    stopped = victim.wait_for("acts")["at"]
    for rank in others:
        rank.go_on()
    errors = [rank.wait_for("error") for rank in others]
    for error in errors:
        check(error["text"])
        assert error["at"] - stopped < SHORT_S + SLACK_S
    # On its own host, errors name the missing rank. The other host may time out before it gets their messages.
    assert "(process 3)" in errors[2]["text"]
    victim.process.send_signal(signal.SIGCONT)
    victim.wait_for("error")
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        rank.wait_for("works again")
    finish(ranks)


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
