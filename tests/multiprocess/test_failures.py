"""What goes wrong in one process ends in an error that names it in every other, and in nothing else.

A launch costs seconds, so failures after which all processes live follow each other in one (test_all_live_on). The full
size has each by itself; `make stress` repeats every test.
"""

import re
import signal

import pytest
from ranks import DEADLINE_S, LONG, PROMPT_S, ROUNDS, SLACK_S, TIMEOUT_S, finish

pytestmark = [pytest.mark.deadline(300), pytest.mark.parametrize("round_", ROUNDS)]

COORDINATOR = {"VICTIM": "0"}
MISMATCHES = {
    "different_ops": ("psum at", "pmax at"),
    "different_shapes": ("8 -> 8 elements", "4 -> 4 elements"),
    "different_dtypes": ("psum at", "psum at"),
    "different_orders": ("psum at", "pmax at"),
    "different_trip_counts": ("psum at", "psum at"),
}


def hear_both_sides(ranks, scenario):
    texts = [rank.hear("error")["text"] for rank in ranks]
    for text in texts:
        assert re.search(r"p(sum|max) at failing.py:\d+ ", text), text
        assert "(process " in text
    for part in MISMATCHES[scenario]:
        assert any(part in text for text in texts), texts


def hear_of_missing_call(more, fewer):
    for rank in (more, fewer):
        for _ in range(2):
            rank.hear("no error")
    assert "ranks [2, 3] (process 1) in no collective" in more.hear("error")["text"]


def hear_of_missing_memory(healthy, starved):
    assert "memfd_create" in starved.hear("error")["text"]
    text = healthy.hear("error")["text"]
    assert "gave up" in text and "memfd_create" in text


def hear_of_stopped(others, victim):
    """Stops and goes on; the others have waited for as long as they should."""
    number = len(others)
    stopped = victim.hear("acts")["at"]
    for rank in others:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert f"[{2 * number}, {2 * number + 1}] (process {number})" in error["text"]
        assert TIMEOUT_S - 1 < error["at"] - stopped < TIMEOUT_S + SLACK_S
    victim.process.send_signal(signal.SIGCONT)
    text = victim.hear("error")["text"]  # whichever of its two devices comes first
    assert "gave up" in text or re.search(rf"\[{2 * number}\]|\[{2 * number + 1}\] did not arrive", text)


def all_work_again(ranks):
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        rank.hear("works again")


def test_all_live_on(start, round_):
    """After each failure collectives of both processes are right."""
    mismatches = ["different_shapes", "different_dtypes", "different_orders"]
    scenarios = [*mismatches, "different_numbers_of_runs", "no_descriptors_left", "stopped"]
    ranks = start(" works_again ".join([*scenarios, ""]), 2)
    for scenario in mismatches:
        hear_both_sides(ranks, scenario)
        all_work_again(ranks)
    hear_of_missing_call(*ranks)
    all_work_again(ranks)
    hear_of_missing_memory(*ranks)
    all_work_again(ranks)
    hear_of_stopped(ranks[:1], ranks[1])
    all_work_again(ranks)
    finish(ranks)


def test_one_after_the_other_is_killed(start, round_):
    """The last in a collective, then the first, which coordinates, between two."""
    first, second, third = start("one_after_the_other_is_killed", 3, **COORDINATOR, **LONG)
    killed = third.hear("acts")["at"]
    assert third.process.wait(DEADLINE_S) == -signal.SIGKILL
    for rank in (first, second):
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "[4, 5] (process 2)" in error["text"]
        assert error["at"] - killed < PROMPT_S
        rank.hear("survivors work")
    for rank in (first, second):
        rank.go_on()
    first.hear("acts")
    assert first.process.wait(DEADLINE_S) == -signal.SIGKILL
    second.go_on()
    errors = [second.hear("error") for _ in range(2)]
    for error in errors:
        assert "psum at failing.py:" in error["text"]
        assert "process of ranks [0, 1] (process 0) has ended" in error["text"]
    assert errors[1]["at"] - errors[0]["at"] < PROMPT_S
    second.hear("survivors work")
    finish([second])


@pytest.mark.full
@pytest.mark.parametrize("scenario", ["killed_in_a_collective", "killed_while_large_data_move"])
def test_process_that_is_killed_in_a_collective(start, scenario, round_):
    *survivors, victim = start(scenario, 3, **LONG)
    killed = victim.hear("acts")["at"]
    assert victim.process.wait(DEADLINE_S) == -signal.SIGKILL
    for rank in survivors:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "[4, 5] (process 2)" in error["text"]
        assert error["at"] - killed < PROMPT_S
        rank.hear("survivors work")
    finish(survivors)


@pytest.mark.full
def test_process_that_is_killed_between_collectives(start, round_):
    *survivors, victim = start("killed_between_collectives", 3, **LONG)
    victim.hear("acts")
    for rank in survivors:
        first, second = rank.hear("error"), rank.hear("error")
        for error in (first, second):
            assert "psum at failing.py:" in error["text"]
            assert "process of ranks [4, 5] (process 2) has ended" in error["text"]
        assert second["at"] - first["at"] < PROMPT_S
        rank.hear("survivors work")
    finish(survivors)


@pytest.mark.full
def test_coordinator_that_is_killed_in_a_collective(start, round_):
    victim, *survivors = start("killed_in_a_collective", 3, **COORDINATOR, **LONG)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "[0, 1] (process 0)" in error["text"]
        assert error["at"] - killed < PROMPT_S
        rank.hear("survivors work")
    finish(survivors)


@pytest.mark.full
def test_coordinator_that_is_killed_between_collectives(start, round_):
    victim, *survivors = start("killed_between_collectives", 3, **COORDINATOR, **LONG)
    victim.hear("acts")
    for rank in survivors:
        for _ in range(2):
            assert "process of ranks [0, 1] (process 0) has ended" in rank.hear("error")["text"]
        rank.hear("survivors work")
    finish(survivors)


@pytest.mark.full
def test_coordinator_that_is_killed_during_bootstrap(start, round_):
    """The survivors can't find each other any more."""
    victim, *survivors = start("coordinator_killed_during_bootstrap", 3, **COORDINATOR)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        for attempt in range(2):
            error = rank.hear("error")
            assert "psum at failing.py:" in error["text"]
            assert f"within {TIMEOUT_S} s (JAXCOMM_TIMEOUT_S)" in error["text"]
            assert error["at"] - killed < (attempt + 1) * (TIMEOUT_S + SLACK_S)
    finish(survivors)


def test_process_that_is_killed_during_bootstrap(start, round_):
    *survivors, victim = start("killed_during_bootstrap", 3)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert f"while compiling, process 2 did not show up within {TIMEOUT_S} s (JAXCOMM_TIMEOUT_S)" in error["text"]
        assert error["at"] - killed < TIMEOUT_S + SLACK_S
        rank.hear("survivors work")
    finish(survivors)


@pytest.mark.full
def test_process_that_is_stopped_and_goes_on(start, round_):
    *others, victim = ranks = start("stopped works_again", 3)
    hear_of_stopped(others, victim)
    all_work_again(ranks)
    finish(ranks)


def test_sender_that_is_stopped_in_the_middle_is_cut_off(start, round_):
    """Its part of the result is never written again; the two can't work together any more."""
    receiver, sender = ranks = start("stopped_while_its_data_lands", 2, nodes="ab")
    stopped = sender.hear("acts")["at"]
    error = receiver.hear("error")
    assert "ppermute at failing.py:" in error["text"] and "(process 1)" in error["text"]
    assert TIMEOUT_S - 1 < error["at"] - stopped < TIMEOUT_S + SLACK_S
    assert "(process 1) can't be reached: its data did not arrive in time" in receiver.hear("error")["text"]
    receiver.hear("each works alone")
    sender.process.send_signal(signal.SIGCONT)
    assert "(process 0)" in sender.hear("error")["text"]
    sender.hear("each works alone")
    finish(ranks)


@pytest.mark.full
@pytest.mark.parametrize("scenario", MISMATCHES)
def test_ranks_that_disagree_see_both_sides(start, scenario, round_):
    ranks = start(f"{scenario} works_again", 2)
    hear_both_sides(ranks, scenario)
    all_work_again(ranks)
    finish(ranks)


@pytest.mark.full
def test_ranks_that_call_a_different_number_of_times(start, round_):
    ranks = start("different_numbers_of_runs works_again", 2)
    hear_of_missing_call(*ranks)
    all_work_again(ranks)
    finish(ranks)


@pytest.mark.full
def test_versions_that_differ(start, round_):
    ranks = start("another_version", 2)
    for rank in ranks:
        assert "runs jaxcomm" in (text := rank.hear("error")["text"])
        assert "99.0" in text
    finish(ranks)


@pytest.mark.full
def test_no_more_shared_memory(start, round_):
    ranks = start("no_descriptors_left works_again", 2)
    hear_of_missing_memory(*ranks)
    all_work_again(ranks)
    finish(ranks)
