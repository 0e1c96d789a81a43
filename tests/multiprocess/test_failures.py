"""What goes wrong in one process ends in an error that names it in every other, and in nothing else.

JAXCOMM_STRESS_ROUNDS repeats every test (`make stress`).
"""

import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading

import pytest

ROUNDS = int(os.environ.get("JAXCOMM_STRESS_ROUNDS", "1"))
TIMEOUT_S = 3  # JAXCOMM_TIMEOUT_S of the processes
PROMPT_S = 2  # until a dead process is noticed
SLACK_S = 3  # for a busy machine
DEADLINE_S = 20

pytestmark = [pytest.mark.deadline(120), pytest.mark.parametrize("round_", range(ROUNDS))]


class Rank:
    """One process; its output as it comes."""

    def __init__(self, name, environment):
        script = pathlib.Path(__file__).with_name("failing.py")
        self.process = subprocess.Popen(
            [sys.executable, script, name], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.said, self.errors = queue.Queue(), []
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(json.loads(line))
        self.said.put(None)

    def hear(self, what):
        """The next thing it says, which must be this."""
        try:
            said = self.said.get(timeout=DEADLINE_S)
        except queue.Empty:
            pytest.fail(f"silent for {DEADLINE_S} s instead of: {what}")
        assert said is not None, f"ended with {self.process.wait()} instead of: {what}\n{''.join(self.errors)}"
        assert said["what"] == what, said
        return said

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self):
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture
def start():
    ranks = []

    def start(scenario, processes):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(processes):
            environment = {
                **os.environ,
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(rank),
                "JAXCOMM_TIMEOUT_S": str(TIMEOUT_S),
            }
            ranks.append(Rank(scenario, environment))
        return ranks

    before = set(os.listdir("/dev/shm"))
    yield start
    for rank in ranks:
        rank.close()
    assert set(os.listdir("/dev/shm")) <= before


def finish(ranks):
    """They come to their end, and end as usual."""
    for rank in ranks:
        rank.hear("end")
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        assert rank.process.wait(DEADLINE_S) == 0, "".join(rank.errors)


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


def test_process_that_is_killed_during_bootstrap(start, round_):
    *survivors, victim = start("killed_during_bootstrap", 3)
    killed = victim.hear("acts")["at"]
    for rank in survivors:
        error = rank.hear("error")
        assert "process 2 did not show up within 3 s (JAXCOMM_TIMEOUT_S)" in error["text"]
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
