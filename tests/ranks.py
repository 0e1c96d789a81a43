"""Processes that run multiprocess/failing.py, seen from the test that starts them."""

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxcomm import recorder

ROUNDS = [0, *(pytest.param(i, marks=pytest.mark.stress) for i in range(1, 20))]
# Dead ranks are detected within 2 s, or later on a busy machine, independently of the time limit, which is longer.
PROMPT_S = 25
LONG = {"JAXCOMM_TIMEOUT_S": "60"}
# Only the wait that a test is about has a short limit, so that a busy machine raises no other errors; see failing.py.
SHORT_S = 3
SHORT = {**LONG, "SHORT_S": str(SHORT_S)}
# Of waits that begin before a process is late.
LONGER_S = 10
LONGER = {**LONG, "SHORT_S": str(LONGER_S)}
# Processes whose programs differ get an error after JAXCOMM_WARN_S.
SOON = {**LONG, "JAXCOMM_WARN_S": "0.6"}
SLACK_S = 25  # for a busy machine
DEADLINE_S = 120  # to start, on a busy machine
SCRIPT = pathlib.Path(__file__).with_name("multiprocess") / "failing.py"
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def argv(scenarios):
    return [sys.executable, str(SCRIPT), *scenarios.split()]


def environment(rank, processes, coordinator, **more):
    return {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # JAX would listen on all interfaces
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(rank),
        **LONG,
        **more,
    }


class Rank:
    """One process in a session of its own, with its output as it arrives."""

    def __init__(self, process, folder=None):
        self.process, self.folder = process, folder
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

    def wait_for(self, what):
        """Returns the next event of the process, which must have this name."""
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the command inside the namespace is a child
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


def finish(ranks):
    """The processes reach their end and exit normally."""
    for rank in ranks:
        rank.wait_for("end")
    for rank in ranks:
        rank.go_on()
    for rank in ranks:
        assert rank.process.wait(DEADLINE_S) == 0, "".join(rank.errors)


def analyzed(ranks, expected, **options):
    """Waits for the verdict on the files of the flight recorder. Before it, the processes have not come so far.

    expected: verdict, processes that cause it (None: any may have noticed it), ranks behind, part of the text.
    """
    verdict, processes, behind, part = expected
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            report = recorder.analyze(ranks[0].folder, window_s=1.0, **options)
        except FileNotFoundError as error:
            report = error
        else:
            first = report.findings[0]
            found = first.verdict.value, first.processes, tuple(sorted(first.behind))
            right = found == (verdict, processes, behind) or (processes is None and found[0] == verdict)
            if right and part in str(report):
                return report
        assert time.monotonic() < deadline, str(report)
        time.sleep(0.2)
