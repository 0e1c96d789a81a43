"""jaxcomm.bench between processes: small comparisons with gloo, and the synchronization of processes."""

import json
import os
import subprocess
import sys
import threading

import pytest

from jaxcomm._measure import process_group
from jaxcomm._measure.process_group import ProcessGroup
from tools import benchmark_table

LIMIT_S = 300  # on a busy machine; it takes 20 on a quiet one

pytestmark = pytest.mark.deadline(LIMIT_S + 30)


def bench(folder, devices, *arguments):
    """Exit status, output and result file of a small benchmark in two processes, without pytest's devices."""
    out = folder / "r.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    launcher = [sys.executable, "-m", "jaxcomm.run", "--processes", "2", "--devices", str(devices)]
    command = [*launcher, "-m", "jaxcomm.bench", *arguments, "--begin", "1K", "--end", "1K", "--reps", "30"]
    done = subprocess.run(  # timeout(1) lets the launcher end its processes
        ["timeout", "--kill-after=10", str(LIMIT_S), *command, "--json", str(out)], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=LIMIT_S + 20, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    output = done.stdout + done.stderr
    return done.returncode, output, json.loads(out.read_text()) if done.returncode == 0 else None


def test_two_processes_are_compared_with_gloo(tmp_path, capsys, monkeypatch):
    status, output, run = bench(tmp_path, 2, "--op", "psum", "pbroadcast")
    assert status == 0, output
    rows = run["records"]
    assert [(r["processes"], r["ranks"], r["op"], r["baseline"]) for r in rows] == [
        (2, 4, "psum", "gloo"), (2, 4, "pbroadcast", "gloo")
    ]  # fmt: skip
    assert all(r["time_us"] > 0 and r["wrong"] == r["baseline_wrong"] == 0 for r in rows)
    assert [r["baseline_time_us"] is None for r in rows] == [False, True]  # jax.lax has no pbroadcast
    assert run["parameters"]["processes"] == "2x2"
    assert run["command"].startswith("python -m jaxcomm.run --processes=2 --devices=2 -m jaxcomm.bench --op psum")
    assert "2 processes x 2 devices" in output and "2 measurements, 0 wrong elements" in output
    monkeypatch.setattr(sys, "argv", ["benchmark_table.py", str(tmp_path / "r.json")])
    benchmark_table.main()
    table = capsys.readouterr().out
    assert "2 processes x 2 devices. One op per `jit` call" in table
    assert table.count(" us (") + table.count(" ms (") == 2 and table.count("(none)") == 1


def test_a_process_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_DEADLINE_S", 0.05)
    ProcessGroup.prepare(tmp_path, 2)
    with pytest.raises(TimeoutError, match=r"process 1 did not come to barrier 1 in 0\.05 s"):
        ProcessGroup(tmp_path, 0, 2).align()


def test_a_group_synchronizes_and_follows_rank_0(tmp_path):
    size, rounds = 3, 200
    ProcessGroup.prepare(tmp_path, size)
    followed, gathered = [[] for _ in range(size)], [[] for _ in range(size)]

    def take_part(rank):
        group = ProcessGroup(tmp_path, rank, size)
        for i in range(rounds):
            followed[rank].append(group.align(i % 3 == 0 if rank == 0 else i % 2 == 0))
            if i % 50 == 0:
                gathered[rank].append(group.gather((rank, i)))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert followed == [[i % 3 == 0 for i in range(rounds)]] * size
    assert gathered == [[[(rank, i) for rank in range(size)] for i in range(0, rounds, 50)]] * size
