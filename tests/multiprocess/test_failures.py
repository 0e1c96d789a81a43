"""A failure of one process raises an error that names it in all others, and has no other effect.

A launch costs seconds. So failures after which all processes live run in one launch, and tests that mostly wait run in
parallel. `make stress` repeats every test.
"""

import concurrent.futures
import re
import signal

import pytest
from ranks import DEADLINE_S, LONG, LONGER, LONGER_S, PROMPT_S, ROUNDS, SHORT, SHORT_S, SLACK_S, SOON, analyzed, finish

from jaxcomm import recorder

pytestmark = [pytest.mark.deadline(300), pytest.mark.parametrize("round_", ROUNDS)]

COORDINATOR = {"VICTIM": "0"}
# Verdict of the flight recorder's analysis, part of its text, parts of the error.
MISMATCHES = {
    "different_ops": ("other call", "pmax at failing.py", "psum at", "pmax at"),
    "different_shapes": ("other shape or dtype", "4 -> 4 elements", "8 -> 8 elements", "4 -> 4 elements"),
    "different_dtypes": ("other shape or dtype", "of int32", "8 elements of float32", "8 elements of int32"),
    "different_algorithms": (
        "other call",
        "direct",
        "of float32, ring; call site 1",
        "of float32, direct; call site 1",
    ),
    "different_tokens": ("other call", "is in moe.route", "3 tokens, 2 choices", "4 tokens, 2 choices"),
    "different_algorithms_of_route_and_dispatch": (
        *("other call", "is in moe.route at"),
        *("are in moe.route_and_dispatch at", "are in moe.route at"),
    ),
    # The ranks wait in an earlier call, which is the same.
    "different_algorithms_of_combine": (
        *("other call", "in another program or execution"),
        *("are in moe.route at", ", in another program or execution"),
    ),
    "different_orders": ("other order", "psum at failing.py", "psum at", "pmax at"),
    "different_trip_counts": (
        *("other call", "in another program or execution"),
        *("psum at", ", in another program or execution"),
    ),
}
BOTH = (0, 1, 2, 3)  # ranks


def is_explained(ranks, verdict, *expected):
    """The processes have raised and wait for the parent. Their dumps say the same as their rings."""
    analyzed(ranks, (verdict, *expected))
    analyzed(ranks, (verdict, *expected), dumps=True)


def hear_both_sides(ranks, scenario):
    """The time limit is longer than the test. Its error would say that ranks did not enter the call."""
    texts = [rank.wait_for("error")["text"] for rank in ranks]
    for text in texts:
        assert re.search(r"(p(sum|max)|moe.\w+) at (moe_)?failing.py:\d+ ", text), text
        assert "calls do not match: ranks [" in text and "(process 0)" in text and "(process 1)" in text, text
        verdict, explanation, *parts = MISMATCHES[scenario]
        assert all(part in text for part in parts), text
    is_explained(ranks, verdict, (0, 1), BOTH, explanation)


def hear_of_missing_call(more, fewer):
    for rank in (more, fewer):
        for _ in range(2):
            rank.wait_for("no error")
    more.go_on()
    assert "ranks [2, 3] (process 1) in no collective" in more.wait_for("error")["text"]


def hear_of_missing_memory(healthy, starved):
    assert "memfd_create" in starved.wait_for("error")["text"]
    text = healthy.wait_for("error")["text"]
    assert "aborted" in text and "memfd_create" in text
    # A process that could not open a file has left no dump.
    analyzed((healthy, starved), ("failed call", (1,), (2, 3), "memfd_create"))


def hear_of_stopped(stopped, other, victim, op="psum", site=r"\w*failing.py:", limit_s=SHORT_S):
    """The process has stopped and continues; the other one has waited for the time limit."""
    error = other.wait_for("error")
    assert re.search(rf"{op} at {site}", error["text"]), error
    # Both ranks are missing, or one of them if the other was in the call when its process stopped.
    assert re.search(r"(\[2, 3\]|rank \d) \(process 1\)", error["text"]), error
    assert limit_s / 2 < error["at"] - stopped < limit_s + SLACK_S
    victim.process.send_signal(signal.SIGCONT)
    text = victim.wait_for("error")["text"]  # the first of its two devices
    # Or its own time is over when it goes on.
    assert "aborted" in text or re.search(r"\[2\]|\[3\] did not arrive|within \d+ s", text), text


def stops(other, victim, *op):
    stopped = victim.wait_for("acts")["at"]
    other.go_on()
    hear_of_stopped(stopped, other, victim, *op)


def all_work_again(ranks):
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        rank.wait_for("works again")


def all_live_on(start):
    """After each failure, collectives of both processes give correct values."""
    ranks = start(" works_again ".join(["different_numbers_of_runs", "no_descriptors_left", "stopped", ""]), 2, **SHORT)
    hear_of_missing_call(*ranks)
    all_work_again(ranks)
    hear_of_missing_memory(*ranks)
    all_work_again(ranks)
    stops(*ranks)
    all_work_again(ranks)
    finish(ranks)


def ranks_disagree(start):
    ranks = start(" works_again ".join(["meshes_of_different_devices", *MISMATCHES, ""]), 2, **SOON)
    all_work_again(ranks)
    for scenario in MISMATCHES:
        hear_both_sides(ranks, scenario)
        all_work_again(ranks)
    for rank in ranks:
        rank.wait_for("end")
    assert recorder.analyze(ranks[0].folder, window_s=60).verdict == "ok"


def one_after_the_other_is_killed(start):
    """The last process ends in a collective, then process 0, the coordinator, between two collectives."""
    first, second, third = start("one_after_the_other_is_killed", 3, **COORDINATOR, **LONG)
    killed = third.wait_for("acts")["at"]
    assert third.process.wait(DEADLINE_S) == -signal.SIGKILL
    hear_of_killed(killed, (first, second), "psum at failing.py:", "[4, 5] (process 2)")
    for rank in (first, second):
        rank.go_on()
    first.wait_for("acts")
    assert first.process.wait(DEADLINE_S) == -signal.SIGKILL
    second.go_on()
    errors = [second.wait_for("error") for _ in range(2)]
    for error in errors:
        assert "psum at failing.py:" in error["text"]
        assert "process of ranks [0, 1] (process 0) has ended" in error["text"]
    assert errors[1]["at"] - errors[0]["at"] < PROMPT_S
    second.wait_for("survivors work")
    finish([second])


def killed_during_bootstrap(start):
    *survivors, victim = start("killed_during_bootstrap", 3, **SHORT)
    killed = victim.wait_for("acts")["at"]
    for rank in survivors:
        error = rank.wait_for("error")
        assert "psum at failing.py:" in error["text"]
        assert f"while compiling, process 2 did not connect within {SHORT_S} s (JAXCOMM_TIMEOUT_S)" in error["text"]
        assert error["at"] - killed < DEADLINE_S
        rank.wait_for("survivors work")
    finish(survivors)


def sender_is_stopped_in_the_middle(start):
    """No later message writes its part of the result. The two processes can't communicate any more."""
    receiver, sender = ranks = start("stopped_while_its_data_lands", 2, nodes="ab", **LONGER)
    stopped = sender.wait_for("acts")["at"]
    error = receiver.wait_for("error")
    assert "all_to_all at failing.py:" in error["text"] and "(process 1)" in error["text"]
    assert LONGER_S / 2 < error["at"] - stopped < LONGER_S + SLACK_S
    assert "(process 1) cannot be reached: its data did not arrive in time" in receiver.wait_for("error")["text"]
    receiver.wait_for("each works alone")
    sender.process.send_signal(signal.SIGCONT)
    assert "(process 0)" in sender.wait_for("error")["text"]
    sender.wait_for("each works alone")
    finish(ranks)


def started_transfers(start):
    """Errors name the start. After ranks have disagreed, later calls work; then one process is killed."""
    survivor, victim = ranks = start("different_shapes works_again killed_in_a_collective", 2, STARTED="1", **SOON)
    texts = [rank.wait_for("error")["text"] for rank in ranks]
    assert all("psum_start at failing.py:" in text for text in texts), texts
    assert any("8 -> 8 elements" in text and "4 -> 4 elements" in text for text in texts), texts
    is_explained(ranks, "other shape or dtype", (0, 1), BOTH, "4 -> 4 elements")
    all_work_again(ranks)
    hear_of_killed(victim.wait_for("acts")["at"], [survivor], "psum_start at failing.py:", "[2, 3] (process 1)")
    finish([survivor])


def reshard_of_a_stopped_and_a_dead_process(start, nodes="ab"):
    """Pieces are on their way when a process stops, and, in another job, when it dies."""
    other, victim = ranks = start("stopped_while_reshard_runs works_again", 2, nodes=nodes, **LONGER)
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        rank.wait_for("has a limit")
    victim.go_on()
    stopped = victim.wait_for("acts")["at"]
    hear_of_stopped(stopped, other, victim, "reshard", "jaxcomm.reshard", LONGER_S)
    all_work_again(ranks)
    finish(ranks)
    survivor, victim = start("killed_while_reshard_runs", 2, nodes=nodes, **LONG)
    hear_of_killed(victim.wait_for("acts")["at"], [survivor], "reshard at jaxcomm.reshard", " (process 1)")
    finish([survivor])


def hear_of_killed(killed, survivors, call, *parts):
    """At once; then the survivors form a group."""
    for rank in survivors:
        error = rank.wait_for("error")
        assert all(part in error["text"] for part in (call, *parts)), error
        assert error["at"] - killed < PROMPT_S
        rank.wait_for("survivors work")


def hear_of_wrong_routings(ranks):
    tables = [*["with different tables of slices"] * 4, "send_sizes is -3"]
    for text in [*tables, "expert 1", "expert -", "row 10000", "does not belong"]:
        errors = [rank.wait_for("error")["text"] for rank in ranks]
        assert all(text in error and "failing.py:" in error for error in errors), (text, errors)
        if len(ranks) == 2:
            own = ((1,), (2, 3)) if "belong" in text else (None, None)
            is_explained(ranks, "failed call", *own, ": jaxcomm: moe.")
        all_work_again(ranks)


def mixtures_of_experts(start):
    """Wrong routings of one rank, then a rank that is late in route_and_dispatch, and then dead in it."""
    ranks = start("tampered_routings stopped_in_one_shot works_again killed_in_one_shot", 2, **SHORT)
    hear_of_wrong_routings(ranks)
    stops(*ranks, "moe.route_and_dispatch")
    all_work_again(ranks)
    survivor, victim = ranks
    call = "moe.route_and_dispatch at moe_failing.py:"
    hear_of_killed(victim.wait_for("acts")["at"], [survivor], call, "[2, 3] (process 1)")
    finish([survivor])


def hosts_fail_together(start):
    """A process learns that another one has failed without the call, or in an earlier one."""
    first, victim, last = ranks = start("tampered_routings killed_in_a_call_of_others", 3, "abc", VICTIM="1", **LONG)
    hear_of_wrong_routings(ranks)
    killed = victim.wait_for("acts")["at"]
    for rank, how in (first, ", the process of"), (last, "(process 0) aborted: "):
        hear_of_killed(killed, [rank], how, "(process 1) cannot be reached")
    finish([first, last])


@pytest.mark.parametrize(
    "checks",
    [
        (all_live_on, one_after_the_other_is_killed, ranks_disagree),
        (mixtures_of_experts, reshard_of_a_stopped_and_a_dead_process, hosts_fail_together),
        (killed_during_bootstrap, sender_is_stopped_in_the_middle, started_transfers),
    ],
    ids=lambda checks: "-".join(check.__name__ for check in checks),
)
def test_side_by_side(start, checks, round_):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for future in [pool.submit(check, start) for check in checks]:
            future.result()


@pytest.mark.full
def test_reshard_in_a_node(start, round_):
    reshard_of_a_stopped_and_a_dead_process(start, nodes="")


@pytest.mark.full
def test_coordinator_that_is_killed_during_bootstrap(start, round_):
    """The survivors can't connect to each other any more."""
    victim, *survivors = start("coordinator_killed_during_bootstrap", 3, **COORDINATOR, **SHORT)
    killed = victim.wait_for("acts")["at"]
    for rank in survivors:
        for attempt in range(2):
            error = rank.wait_for("error")
            assert "psum at failing.py:" in error["text"]
            assert f"within {SHORT_S} s (JAXCOMM_TIMEOUT_S)" in error["text"]
            assert error["at"] - killed < (attempt + 1) * (SHORT_S + SLACK_S)
    finish(survivors)
