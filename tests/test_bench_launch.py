"""jaxcomm.bench between processes, without starting them: what each file does alone."""

import os
import pathlib
import sys

import pytest

from jaxcomm._measure import process_group
from jaxcomm.bench import launch


def lines(program):
    return launch._lines([sys.executable, "-c", program], dict(os.environ))


def test_lines_of_processes_come_without_marks():
    assert list(lines(r"print('[0] one\n[12] two\nthree [3] \xff')")) == ["one", "two", "three [3] \xff"]


def test_processes_that_fail_raise_after_their_last_line():
    said = []
    with pytest.raises(RuntimeError, match="ended with exit status 3"):
        for line in lines("print('last words', flush=True); raise SystemExit(3)"):
            said.append(line)
    assert said == ["last words"]


def test_a_reader_that_stops_ends_the_processes():
    running = lines("import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    process = int(next(running))
    running.close()
    assert not pathlib.Path(f"/proc/{process}").exists()


def test_a_process_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_DEADLINE_S", 0.05)
    process_group.ProcessGroup.prepare(tmp_path, 2)
    with pytest.raises(TimeoutError, match=r"process 1 did not come to barrier 1 in 0\.05 s"):
        process_group.ProcessGroup(tmp_path, 0, 2).align()
