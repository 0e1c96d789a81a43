"""jaxcomm.bench between processes: small comparisons with gloo, and the synchronization of processes."""

import json
import os
import subprocess
import sys
import threading

import pytest

from jaxcomm._measure.process_group import ProcessGroup

LIMIT_S = 300  # on a busy machine; it takes 20 on a quiet one

pytestmark = pytest.mark.deadline(LIMIT_S + 30)


def bench(folder, *arguments):
    """Exit status, output and result file of a small benchmark, without pytest's setting of devices."""
    out = folder / "r.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    command = [sys.executable, "-m", "jaxcomm.bench", *arguments, "--begin", "1K", "--end", "1K", "--reps", "30"]
    done = subprocess.run(  # timeout(1) lets the program end its processes
        ["timeout", "--kill-after=10", str(LIMIT_S), *command, "--json", str(out)], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=LIMIT_S + 20, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    output = done.stdout + done.stderr
    return done.returncode, output, json.loads(out.read_text()) if done.returncode == 0 else None


@pytest.mark.full
def test_with_gloo(tmp_path):
    arguments = ["--processes", "2x2", "2x1", "--op", "psum", "pbroadcast", "barrier"]
    status, output, run = bench(tmp_path, *arguments)
    assert status == 0, output
    rows = run["records"]
    assert [(r["processes"], r["ranks"], r["op"], r["baseline"]) for r in rows] == [
        *((2, ranks, op, "gloo") for ranks in (4, 2) for op in ("psum", "pbroadcast", "barrier")),
    ]
    assert all(r["time_us"] > 0 and r["wrong"] == r["baseline_wrong"] == 0 for r in rows)
    assert [r["baseline_time_us"] is None for r in rows[:3]] == [False, True, False]  # jax.lax has no pbroadcast
    assert run["parameters"]["processes"] == ["2x2", "2x1"]
    assert "2 processes x 2 devices" in output and "6 measurements, 0 wrong elements" in output
    table = subprocess.run(
        [sys.executable, "-m", "jaxcomm.bench", "--table", str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "2 processes x 1 device. One op per `jit` call" in table.stdout, table.stderr
    assert table.stdout.count(" us (") + table.stdout.count(" ms (") == 6 and table.stdout.count("(none)") == 2


def test_with_a_baseline(tmp_path):
    status, output, run = bench(tmp_path, "--processes", "2x2", "--op", "psum", "pbroadcast", "--mode", "call")
    assert status == 0, output
    rows = run["records"]
    assert [(r["processes"], r["ranks"], r["op"], r["baseline"]) for r in rows] == [
        (2, 4, "psum", "gloo"), (2, 4, "pbroadcast", "gloo")
    ]  # fmt: skip
    assert all(r["time_us"] > 0 and r["wrong"] == r["baseline_wrong"] == 0 for r in rows)
    assert [r["baseline_time_us"] is None for r in rows] == [False, True]  # jax.lax has no pbroadcast
    assert "2 processes x 2 devices" in output and "2 measurements, 0 wrong elements" in output


@pytest.mark.full
def test_a_process_that_fails_ends_the_run(tmp_path):
    status, output, _ = bench(tmp_path, "--processes", "2x1", "--op", "psum", "--algorithm", "hierarchical")
    assert status == 1
    assert "hierarchical" in output and "ended with exit status" in output


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
