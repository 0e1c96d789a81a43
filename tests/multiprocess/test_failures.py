"""What goes wrong in one process ends in an error that names it in every other, and in nothing else.

JAXCOMM_STRESS_ROUNDS repeats every test (`make stress`).
"""

import signal

import pytest
from ranks import DEADLINE_S, PROMPT_S, ROUNDS, SLACK_S, TIMEOUT_S, finish

pytestmark = [pytest.mark.deadline(300), pytest.mark.parametrize("round_", range(ROUNDS))]


@pytest.mark.parametrize("scenario", ["killed_in_a_collective", "killed_while_large_data_move"])
def test_process_that_is_killed_in_a_collective(start, scenario, round_):
    *survivors, victim = start(scenario, 3)
    killed = victim.hear("acts")["at"]
    assert victim.process.wait(DEADLINE_S) == -signal.SIGKILL
    for rank in survivors:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "[4, 5] (process 2)" in error["text"]
        assert error["at"] - killed < PROMPT_S + SLACK_S
        rank.hear("survivors work")
    finish(survivors)


def test_process_that_is_killed_between_collectives(start, round_):
    *survivors, victim = start("killed_between_collectives", 3)
    victim.hear("acts")
    for rank in survivors:
        first, second = rank.hear("error"), rank.hear("error")
        for error in (first, second):
            assert "psum at failing.py:" in error["text"]
            assert "process of ranks [4, 5] (process 2) has ended" in error["text"]
        assert second["at"] - first["at"] < PROMPT_S
        rank.hear("survivors work")
    finish(survivors)


COORDINATOR = {"VICTIM": "0"}


def test_coordinator_that_is_killed_in_a_collective(start, round_):
    victim, *survivors = start("killed_in_a_collective", 3, **COORDINATOR)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "[0, 1] (process 0)" in error["text"]
        assert error["at"] - killed < PROMPT_S + SLACK_S
        rank.hear("survivors work")
    finish(survivors)


def test_coordinator_that_is_killed_between_collectives(start, round_):
    victim, *survivors = start("killed_between_collectives", 3, **COORDINATOR)
    victim.hear("acts")
    for rank in survivors:
        for _ in range(2):
            assert "process of ranks [0, 1] (process 0) has ended" in rank.hear("error")["text"]
        rank.hear("survivors work")
    finish(survivors)


def test_coordinator_that_is_killed_during_bootstrap(start, round_):
    """The survivors can't find each other any more."""
    victim, *survivors = start("coordinator_killed_during_bootstrap", 3, **COORDINATOR)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        for attempt in range(2):
            error = rank.hear("error")
            assert "psum at failing.py:" in error["text"]
            assert "within 3 s (JAXCOMM_TIMEOUT_S)" in error["text"]
            assert error["at"] - killed < (attempt + 1) * (TIMEOUT_S + 2 * SLACK_S)
    finish(survivors)


def test_process_that_is_killed_during_bootstrap(start, round_):
    *survivors, victim = start("killed_during_bootstrap", 3)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "while compiling, process 2 did not show up within 3 s (JAXCOMM_TIMEOUT_S)" in error["text"]
        assert error["at"] - killed < TIMEOUT_S + 2 * SLACK_S
        rank.hear("survivors work")
    finish(survivors)


def test_process_that_is_stopped_and_goes_on(start, round_):
    *others, victim = ranks = start("stopped", 3)
    stopped = victim.hear("acts")["at"]
    for rank in others:
        error = rank.hear("error")
        assert "psum at failing.py:" in error["text"]
        assert "[4, 5] (process 2)" in error["text"]
        assert TIMEOUT_S - 1 < error["at"] - stopped < TIMEOUT_S + SLACK_S
        rank.hear("ready")
    victim.process.send_signal(signal.SIGCONT)
    text = victim.hear("error")["text"]  # whichever of its two devices comes first
    assert "gave up" in text or "[5] did not arrive" in text or "[4] did not arrive" in text
    victim.hear("ready")
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        rank.hear("works again")
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


MISMATCHES = {
    "different_ops": ("psum at", "pmax at"),
    "different_shapes": ("8 -> 8 elements", "4 -> 4 elements"),
    "different_dtypes": ("psum at", "psum at"),
    "different_orders": ("psum at", "pmax at"),
    "different_trip_counts": ("psum at", "psum at"),
}


@pytest.mark.parametrize("scenario", MISMATCHES)
def test_ranks_that_disagree_see_both_sides(start, scenario, round_):
    ranks = start(scenario, 2)
    texts = [rank.hear("error")["text"] for rank in ranks]
    for text in texts:
        assert "(process " in text
    for part in MISMATCHES[scenario]:
        assert any(part in text for text in texts), texts
    if scenario == "different_ops":
        for rank in ranks:
            rank.go_on()
        for rank in ranks:
            rank.hear("works again")
    finish(ranks)


def test_ranks_that_call_a_different_number_of_times(start, round_):
    more, fewer = ranks = start("different_numbers_of_runs", 2)
    for rank, good in ((more, 2), (fewer, 2)):
        for _ in range(good):
            rank.hear("no error")
    error = more.hear("error")
    assert "ranks [2, 3] (process 1) in no collective" in error["text"]
    for rank in ranks:
        rank.go_on()
    finish(ranks)


def test_versions_that_differ(start, round_):
    ranks = start("another_version", 2)
    for rank in ranks:
        assert "runs jaxcomm" in (text := rank.hear("error")["text"])
        assert "99.0" in text
    finish(ranks)


def test_no_more_shared_memory(start, round_):
    ranks = start("no_descriptors_left", 2)
    texts = [rank.hear("error")["text"] for rank in ranks]
    assert "memfd_create" in texts[1]
    assert "gave up" in texts[0] and "memfd_create" in texts[0]
    finish(ranks)
