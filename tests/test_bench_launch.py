"""jaxcomm.bench between processes, without starting them: what each file does alone."""

import json
import os
import pathlib
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm._measure import process_group
from jaxcomm.bench import launch, mpi, startup


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


def test_start_up_is_that_of_the_slowest_process_in_the_median_launch(monkeypatch):
    """Seconds that two processes print in three launches; the records hold microseconds."""
    printed = {
        "none": iter([(1.0, 2.0), (9.0, 8.0), (3.0, 1.0)]),
        "jaxcomm": iter([(4.0, 5.0), (6.0, 1.0), (7.0, 30.0)]),
        "gloo": iter([(10.0, 1.0), (2.0, 11.0), (12.0, 3.0)]),
    }

    def started(command, environment):
        assert environment["JAX_NUM_CPU_DEVICES"] == "1"
        key = "computation" if command[-1] == "none" else "collective"
        yield "a line of someone else"
        for seconds in next(printed[command[-1]]):
            yield json.dumps({"initialize": 0.5, "computation": 0.75, key: seconds})

    monkeypatch.setattr(launch, "_lines", started)
    own, gloo = launch._start_up(2, 3)
    assert (own.baseline, own.time_us, own.baseline_time_us) == ("jax.distributed", 6e6, 3e6)
    assert (gloo.baseline, gloo.time_us, gloo.baseline_time_us) == ("gloo", 6e6, 11e6)
    assert own.p99_us == pytest.approx(np.percentile([5e6, 6e6, 30e6], 99))
    assert gloo.baseline_p99_us == pytest.approx(np.percentile([10e6, 11e6, 12e6], 99))
    for row in (own, gloo):
        assert (row.mode, row.ranks, row.processes, row.reps, row.chain) == ("start", 2, 2, 3, 1)
        assert (row.wrong, row.baseline_wrong, row.limit_us) == (0, 0, None)


def test_time_since_the_start_of_a_process():
    program = f"import runpy; print(runpy.run_path({startup.__file__!r})['_since_start_s']())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert 0 < float(done.stdout) <= time.monotonic() - began + tick_s


@pytest.mark.parametrize("what", ["none", "jaxcomm", "gloo"])
def test_start_up_runs_the_collective_that_it_is_asked_for(what, monkeypatch, capsys):
    """In this process, whose devices stand for those of several."""
    used = []

    def recorded(name, psum):
        return lambda x, axis: used.append(name) or psum(x, axis)

    monkeypatch.setattr(jax.distributed, "initialize", lambda: used.append("initialize"))
    monkeypatch.setattr(jaxcomm, "psum", recorded("jaxcomm", jaxcomm.psum))
    monkeypatch.setattr(jax.lax, "psum", recorded("gloo", jax.lax.psum))
    startup.main(what)
    assert used == ["initialize", *([what] if what != "none" else [])]
    ends_s = json.loads(capsys.readouterr().out)
    assert list(ends_s) == ["initialize", "computation", *(["collective"] if what != "none" else [])]
    assert list(ends_s.values()) == sorted(ends_s.values())


class Comm:
    """Rank 1 of 3, of MPI."""

    rank, size = 1, 3


def test_arguments_of_mpi4jax(monkeypatch):
    """A fake that returns its arguments by the names that mpi4jax documents."""
    comm = Comm()
    fake = types.SimpleNamespace(
        allreduce=lambda x, op, *, comm: ("allreduce", x.shape, op, comm),
        allgather=lambda x, *, comm: np.stack([x] * comm.size),
        alltoall=lambda x, *, comm: x[::-1],
        sendrecv=lambda sendbuf, recvbuf, source, dest, *, comm: (sendbuf.shape, recvbuf.shape, source, dest),
        bcast=lambda x, root, *, comm: ("bcast", x.shape, root),
    )
    constants = types.SimpleNamespace(COMM_WORLD=comm, SUM="sum", MAX="max")
    monkeypatch.setitem(sys.modules, "mpi4jax", fake)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=constants))
    library, x = mpi.Mpi4jax(), np.arange(6)
    assert library.psum(x, None) == ("allreduce", (6,), "sum", comm)
    assert library.pmax(x, None) == ("allreduce", (6,), "max", comm)
    np.testing.assert_array_equal(library.all_gather(x, None, True), np.tile(x, 3))
    np.testing.assert_array_equal(library.all_to_all(x, None, 0, 0, True), [4, 5, 2, 3, 0, 1])  # blocks of two
    assert library.ppermute(x, None, [(0, 1), (1, 2), (2, 0)]) == ((6,), (6,), 0, 2)
    assert library.pbroadcast(x, None, 2) == ("bcast", (6,), 2)


def test_a_process_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_DEADLINE_S", 0.05)
    process_group.ProcessGroup.prepare(tmp_path, 2)
    with pytest.raises(TimeoutError, match=r"process 1 did not come to barrier 1 in 0\.05 s"):
        process_group.ProcessGroup(tmp_path, 0, 2).align()
