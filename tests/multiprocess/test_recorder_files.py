"""The flight recorder's files of one process, also changed into those of several: counters, trace, report, page."""

import dataclasses
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import time
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from ranks import DEADLINE_S, free_address

import jaxcomm
from jaxcomm import recorder
from jaxcomm.recorder import _chrome, _cli, _file, _html, _links, _pytorch, _report, _runs, _stragglers, _top, _verdict


def run(code, folder, **environment):
    """One process with two devices. folder None: the default."""
    env = {
        **{name: value for name, value in os.environ.items() if name != "JAXCOMM_RECORDER"},
        **({} if folder is None else {"JAXCOMM_RECORDER": str(folder)}),
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
        **environment,
    }
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=DEADLINE_S)


CALLS = """
import jax, jax.numpy as jnp, jaxcomm, jaxcomm.recorder as recorder
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.jit(jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")))
for _ in range(10): f(jnp.ones((2, 8))).block_until_ready()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of one process that made ten calls with room for four, a trace, and ended."""
    folder = tmp_path_factory.mktemp("rings")
    code = CALLS + (
        "import contextlib\n"
        "with contextlib.suppress(KeyError), jaxcomm.recorder.trace('TRACE', steps=True):\n"
        "    f(jnp.ones((2, 8))).block_until_ready()\n"
        "    raise KeyError\n"
        "s, = jaxcomm.recorder.stats().sites\n"
        "print(s.op, s.calls, s.bytes, s.ranks, s.seconds, s.waiting_seconds)\n"
        "import urllib.request\n"
        "url = f'http://127.0.0.1:{jaxcomm.recorder.serve()}/metrics'\n"
        "page = urllib.request.urlopen(url, timeout=60)\n"
        "print(page.headers['Content-Type'], page.read().decode())\n"
        "jaxcomm.recorder.dump()\n"
        "jaxcomm.recorder.dump('TRACE.copy')\n"
    ).replace("TRACE", str(folder / "trace.json"))
    done = run(code, folder, JAXCOMM_RECORDER_CALLS="4")
    assert done.returncode == 0, done.stderr
    (folder / "out").write_text(done.stdout)
    return folder


def test_counters(folder):
    lines = (folder / "out").read_text().splitlines()
    (site,) = _file.read(next(folder.glob("*.ring"))).sites
    assert lines[0] == f"psum 11 {11 * 8 * 4} (0, 1) {site.time_ns / 1e9} {site.waiting_ns / 1e9}"
    assert lines[1].startswith("text/plain; version=0.0.4")
    labels = [line for line in lines if line.startswith("jaxcomm_calls_total{")]
    assert len(labels) == 1 and labels[0].endswith(" 11") and 'op="psum"' in labels[0]


def test_trace(folder):
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    calls = [event for event in events if event["ph"] == "X" and event["name"] == "psum"]
    assert [rows[call["tid"]] for call in calls] == ["rank 0", "rank 1"] and calls[0]["dur"] > 0
    found = calls[0]["args"]
    assert found["bytes"] == 32 and found["sequence"] == 11
    expected = jaxcomm.explain("psum", jax.ShapeDtypeStruct((8,), jnp.float32), 2)
    for rank, call in enumerate(calls):
        assert call["args"]["steps"] == [line.strip() for line in expected.steps_text(rank).splitlines()[1:]]
    assert found["algorithm"] == expected.algorithm
    assert found["predicted_us"] == pytest.approx(1e6 * expected.predicted_time_s, abs=1e-3)
    assert found["busbw_GB_per_s"] == pytest.approx(32 / found["moving_us"] / 1e3, abs=1e-3)  # 2 * (n - 1) / n = 1


def test_calls_at_the_same_time_have_rows_of_their_own(folder):
    ring = _file.read(next(folder.glob("*.ring")))
    times = [(0, 10), (5, 8), (9, 12), (10, 11)]  # ns of arrival and end, in the order of arrival
    ring.calls = [
        dataclasses.replace(ring.calls[0], number=i, arrived_ns=start, started_ns=start, running_ns=0, ended_ns=end)
        for i, (start, end) in enumerate(times, 1)
    ]
    events = json.loads(_chrome.trace(ring, 1, {}))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = {
        name: [e["args"]["number"] for e in events if e["ph"] == "X" and names[e["tid"]] == name]
        for name in names.values()
    }
    assert rows == {"rank 0": [1, 4], "rank 0 (2)": [2, 3], "rank 1": [1, 4], "rank 1 (2)": [2, 3]}


def rings_of(folder, calls_of, num_processes=2):
    """A program in which each process has two ranks and these calls: changes of a recorded call."""
    recorded = _file.read(next(folder.glob("*.ring")))
    group = _file.Group(1, tuple(range(2 * num_processes)), tuple(p // 2 for p in range(2 * num_processes)))
    rings = {}
    for process, changes in enumerate(calls_of):
        header = {**recorded.header, "process": process, "num_processes": num_processes}
        calls = []
        for number, change in enumerate(changes, 1):
            change = {"site": {}, **change}
            of = dataclasses.replace(group, hash=change.pop("hash", 1))
            site = dataclasses.replace(recorded.sites[0], **{"group": of, **change.pop("site")})
            calls.append(dataclasses.replace(recorded.calls[0], number=number, site=site, **change))
        rings[process] = dataclasses.replace(recorded, header=header, calls=calls)
    return _runs.Run(rings, [], dict.fromkeys(rings, 0))


def in_states(run, states, alive_s=()):
    """With these last signs of life, if any."""
    for process, state in enumerate(states):
        run.rings[process].__dict__["state"] = state
    for process, last_s in enumerate(alive_s):
        run.rings[process].header["alive_ns"] = last_s * S
    return run


S, MIB = 10**9, 1 << 20


def gathers(algorithm, of_ranks, key, seconds):
    """An all_gather of blocks of 1 MiB. All processes but the first enter it after 2 s. Each clock is 100 s ahead."""
    processes, n = sorted(set(of_ranks)), len(of_ranks)
    group = _file.Group(len(processes) * n, tuple(range(n)), of_ranks)
    site = {"text": "all_gather at a.py:1 (f)", "algorithm": algorithm, "group": group}
    same = {"input_count": MIB // 4, "output_count": n * MIB // 4, "key": key, "site": site}
    times = "arrived_ns", "started_ns", "running_ns", "ended_ns"
    at_s = [(0, 1, 2 if process else 1, 2 + seconds) for process in processes]
    return [same | {name: (100 * p + s) * S for name, s in zip(times, at_s[p], strict=True)} for p in processes]


def links_of(folder, calls, processes):
    run = rings_of(folder, calls, processes)
    run.offset_ns = {process: -100 * process * S for process in run.rings}
    return _links.find(run)


def test_links(folder, monkeypatch):
    """A ring of three processes gives one bound for its three pairs; a second group tells one of them from the others.

    On a ring of n ranks, a rank sends n - 1 blocks to the next one. Between two processes of two ranks, each rank sends
    its block to two others.
    """
    three = (0, 0, 1, 1, 2, 2)
    around = [gathers("ring", three, key, seconds) for key, seconds in ((11, 40), (12, 10), (13, 1))]  # median: 10 s
    (link,) = links_of(folder, zip(*around, strict=True), 3)
    expected = jaxcomm.explain("all_gather", jax.ShapeDtypeStruct((MIB // 4,), jnp.float32), 6, algorithm="ring",
                               scope="node")  # fmt: skip
    assert (link.pairs, link.calls, link.bytes_per_s) == (((0, 1), (0, 2), (1, 2)), 3, 5 * MIB / 10)
    assert link.predicted_bytes_per_s == pytest.approx(5 * MIB / expected.predicted_time_s)

    around = gathers("ring", three, 11, 10)
    around[2] |= {"waiting_rank": 4, "waiting_peer": 3}  # it waits for process 1
    two = gathers("direct", (0, 0, 1, 1), 21, 1)
    slow, unknown, fast = links_of(folder, [[around[0], two[0]], [around[1], two[1]], [around[2]]], 3)
    assert (slow.pairs, slow.waited, slow.bytes_per_s) == (((1, 2),), 1, 5 * MIB / 10)
    assert (unknown.pairs, unknown.waited) == (((0, 2),), 0)
    assert (fast.pairs, fast.algorithm, fast.bytes_per_s) == (((0, 1),), "direct", 4 * MIB)
    (uneven,) = links_of(folder, [[one] for one in gathers("direct", (0, 0, 1, 2), 11, 1)], 3)
    assert (len(uneven.pairs), uneven.bytes_per_s) == (3, MIB)  # of a process with two ranks, pairs send two blocks
    monkeypatch.setattr(_links, "_MOST_SITES", 1)  # the calls with most bytes
    assert {x.algorithm for x in links_of(folder, [[around[0], two[0]], [around[1], two[1]], [around[2]]], 3)} == {
        "ring"
    }
    for calls, processes in (([[around[0]]], 3), ([[{"key": 1}]], 1)):
        assert not links_of(folder, calls, processes)  # files of other processes are missing; a process has no links


FAILED = {"phase": "failed", "key": 5, "arrived_ns": 10 * S, "ended_ns": 12 * S}
DONE = {**FAILED, "phase": "done", "ended_ns": 11 * S}
WAITS = {"phase": "running", "key": 5, "ended_ns": 0}
ELSEWHERE = {**WAITS, "key": 7, "arrived_ns": 2 * S, "hash": 2}  # in another group
EARLY = {**FAILED, "arrived_ns": 2 * S, "ended_ns": 10 * S}


def arriving(arrived_s):
    """One of two devices."""
    return {"phase": "arriving", "key": 0, "arrived_ns": arrived_s * S, "ended_ns": 0, "arrived": (0,)}


# Calls of two processes, their states, last signs of life (none: now), whether they are on different hosts, cause.
KILLED, ALONE, STOPPED = ("dead", "dead"), ("dead", "ended (ValueError)"), ("running", "stopped")
STUCK = "stuck outside a collective"
CAUSES = {
    "killed between two arrivals": ([FAILED], [arriving(10)], KILLED, (14, 11), False, "process dead"),
    "killed while it waited for its own device": ([FAILED], [arriving(1)], KILLED, (14, 11), False, "never joined"),
    "failed, and the other one waited": ([ELSEWHERE], [EARLY], ALONE, (9, 9), False, "deadlock across groups"),
    "failed, and the other one was in no call": ([], [EARLY], ALONE, (9, 9), False, "process dead"),
    "killed on another host before the failure": ([FAILED], [DONE], KILLED, (14, 11), True, "process dead"),
    "killed on another host after the failure": ([FAILED], [DONE], KILLED, (14, 13), True, "cut link"),
    "stopped before its first call": ([WAITS], [], STOPPED, (), True, STUCK),
    "stopped in a call": ([WAITS], [WAITS], STOPPED, (), True, STUCK),
    "stopped between two arrivals": ([WAITS], [arriving(10)], STOPPED, (), False, STUCK),
}


@pytest.mark.parametrize(("one", "other", "states", "alive_s", "hosts", "expected"), CAUSES.values(), ids=CAUSES)
def test_cause(folder, one, other, states, alive_s, hosts, expected):
    ahead_s = 1000 if hosts and alive_s else 0  # the clock of the second process
    other = [{k: v + ahead_s * S if k.endswith("_ns") and v else v for k, v in call.items()} for call in other]
    run = in_states(rings_of(folder, [one, other]), states, [alive + ahead_s * p for p, alive in enumerate(alive_s)])
    run.offset_ns[1] = -ahead_s * S
    for process in range(2):
        run.rings[process].header["node"] = str(process if hosts else 0)
    (finding,) = _verdict.diagnose(run, window_s=60 if alive_s else 0)
    assert finding.verdict.value == expected
    assert finding.behind == (2, 3) or expected != STUCK


def test_the_call_that_the_other_one_has_left(folder):
    """A process died in a call that had ended for its peer; the peer failed in the next one. Else both have hung."""
    for phase, cause in (("done", True), ("failed", False)):
        earlier = {"key": 5, "arrived_ns": 9 * S, "ended_ns": 10 * S, "sequence": 1}
        later = {"phase": "failed", "key": 6, "arrived_ns": 10 * S, "ended_ns": 12 * S, "sequence": 2}
        run = rings_of(folder, [[{**earlier, "phase": phase}, later], [{**earlier, "phase": "running"}]])
        in_states(run, KILLED, (14, 11))
        assert _verdict._Diagnosis(run, 60).died_first(1, 0, run.rings[0].calls[1]) == cause


def test_devices_of_one_process_that_disagree(folder):
    """Their process is the cause, seen from both, unless its error names another one."""
    failed = {"phase": "failed", "ended_ns": 2 * S}
    for text, expected in (("ranks 2 and 3 are in it", "failed call"), ("ranks [0] (process 0)", "never joined")):
        run = rings_of(folder, [[{**failed, "key": 5}], [{**failed, "key": 0, "arrived": (2,)}]])
        run.rings[1].errors = [(2 * S, text)]
        findings = _verdict.diagnose(run, window_s=60)
        assert expected in {finding.verdict.value for finding in findings}
        if expected == "failed call":
            (finding,) = findings
            assert (finding.processes, finding.behind) == ((1,), (2, 3))


def test_stacks_of_an_earlier_wait_are_no_cause(folder, tmp_path):
    """The process was killed 2 s after its last call had arrived. The end of a call that failed is no progress."""
    for ended_s, written_s, current in ((0, -3, set()), (0, -1, {0}), (9, -1, {0})):
        phase = "failed" if ended_s else "arriving"
        run = rings_of(folder, [[{"phase": phase, "ended_ns": ended_s * S}]], 1)
        call, header = run.rings[0].calls[0], run.rings[0].header
        run.rings[0].calls = [dataclasses.replace(call, arrived_ns=8 * S, started_ns=0, running_ns=0)]
        header |= {"started_ns": 0, "alive_ns": 10 * S, "alive_unix_ns": 1000 * S}
        stacks = tmp_path / f"{run.rings[0].path.name}.stacks"
        stacks.write_text("endpoint 'a' waits")
        os.utime(stacks, ns=(0, (1000 + written_s) * S))
        assert _report._stacks(tmp_path, run, {0}, ask=False) == ({0: "endpoint 'a' waits"}, current)


def test_a_file_exists_before_the_first_call(tmp_path):
    """From initialize() on, so that analyze sees a process that does not come to its first call."""
    code = f"import os, jaxcomm; jaxcomm.distributed.initialize({free_address()!r}, 1, 0); os._exit(0)"
    done = run(code, tmp_path)
    ring = _file.read(next(tmp_path.glob("process-0-*.ring")))
    assert (ring.state, ring.header["num_processes"], ring.calls) == ("dead", 1, []), done.stderr


def test_a_later_call_of_the_group_follows_a_failure(folder):
    """Also of another call site."""
    failed, done = {"phase": "failed", "site": {"identity": 1}}, {"phase": "done", "site": {"identity": 2}}
    for calls, expected in (([failed, done], []), ([done, failed], [2])):
        diagnosis = _verdict._Diagnosis(rings_of(folder, [calls, []]), 1.0)
        assert [call.number for call in diagnosis.last_failures(0)] == expected


def test_report_of_a_real_trace(folder, capsys):
    assert _cli.main(["report", "--json", str(folder / "trace.json")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["op"], row["ranks"], row["calls"]) == ("psum", 2, 1) and row["copy_limit_us"] > 0


LATE = """
import threading, time, numpy as np
late = threading.Event()
def load(rank): rank == 1 and late.wait()
def step(x):
    jax.experimental.io_callback(load, None, jax.lax.axis_index("i"))
    return jaxcomm.psum(x, "i")
g = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(), check_vma=False))
y = g(jnp.ones(2))
deadline = time.monotonic() + DEADLINE_S
while not (found := recorder.stats().late_ranks) and time.monotonic() < deadline: time.sleep(0.05)
late.set()
y.block_until_ready()
print(found, recorder.stats().late_ranks)
"""


def test_late_ranks(tmp_path):
    done = run(CALLS + LATE.replace("DEADLINE_S", str(DEADLINE_S)), tmp_path, JAXCOMM_WARN_S="0.5")
    assert done.stdout == "(1,) ()\n", done.stderr


SERVED = LATE.partition("deadline =")[0] + "print(recorder.serve(), flush=True); input(); late.set()"


def test_top_and_a_dump_while_the_program_hangs(tmp_path, capsys):
    """Over HTTP with the job's token, and by the trigger of the folder."""
    env = {**os.environ, "JAXCOMM_RECORDER": str(tmp_path), "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CALLS + SERVED], env=env, **pipes) as program:
        url = f"http://127.0.0.1:{program.stdout.readline().strip()}"
        token, wrong = tmp_path / "token", tmp_path / "wrong"
        assert token.stat().st_mode & 0o777 == 0o600
        wrong.write_text("x" + token.read_text()[1:])
        deadline, missing = time.monotonic() + DEADLINE_S, []
        while missing != [1] and time.monotonic() < deadline:
            _cli.main(["top", "--once", "--json", "--interval", "0.1", "--url", url, "--token", str(token)])
            missing = json.loads(capsys.readouterr().out)["missing_ranks"]
        assert missing == [1]
        (tmp_path / "dump").touch()
        while not (dumps := list(tmp_path.glob("*.ring.dump"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _file.read(dumps[0]).calls[-1].arrived == (0,)
        gone = ["--url", "http://127.0.0.1:1"]
        assert _cli.main(["analyze", "--window", "1", "--url", url, *gone, "--token", str(token)]) == 1
        said = capsys.readouterr().out
        assert "never joined" in said and "note: http://127.0.0.1:1 does not answer" in said
        assert _cli.main(["analyze", "--url", url, "--token", str(wrong)]) == 2
        assert "401" in capsys.readouterr().err
        program.communicate("\n", timeout=DEADLINE_S)


def test_the_ring_keeps_the_latest_calls(folder):
    for pattern in ("*.ring", "*.ring.dump", "trace.json.copy"):
        ring = _file.read(next(folder.glob(pattern)))
        assert [call.sequence for call in ring.calls] == [8, 9, 10, 11]
        assert all(call.phase == "done" and call.arrived == (0, 1) for call in ring.calls)
        assert ring.last_dropped(ring.sites[0].group) == 7


def test_page(folder, tmp_path, monkeypatch):
    """One file, well formed, with a bar for each part of each call."""
    page = tmp_path / "page.html"
    assert _cli.main(["analyze", str(folder), "--html", str(page)]) == 0
    root = ElementTree.fromstring(page.read_text().partition("</head>")[2].removesuffix("</html>\n"))
    assert root.find("h1/span").text == "ok" and not re.search(r"https?://|src=", page.read_text())
    assert len(root.findall("svg/rect")) == 8 and root.find("svg/text").text.endswith(", ended (exit)")
    monkeypatch.setattr(_html, "_CALLS", 1)  # the latest
    assert _html.page(*_report.find(folder, 10, False, False)).count("call 11 of its group") == 2


def jumped(data):
    layout = json.loads(data[16:].partition(b"\0")[0])
    (at,) = [at for name, _, at in layout["header"]["fields"] if name == "alive_unix_ns"]
    data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + 100 * 10**9).to_bytes(8, "little")
    return data


# What is changed, the exit status, and what is said.
DAMAGES = {
    "clock": (jumped, 0, "was set by +100.0 s"),
    "truncated": (lambda data: data[:-8192], 0, "truncated after"),
    "newer": (lambda data: data[:8] + b"\t" + data[9:], 0, "written by a newer jaxcomm (format 9, known 2)"),
    "empty": (lambda data: b"", 2, "empty"),
    "foreign": (lambda data: b"\x7fELF" * 100, 2, "not a file of the flight recorder"),
    "older": (lambda data: data[:8] + b"\1" + data[9:], 2, "written by an older jaxcomm (format 1, known 2)"),
    "cut in the header": (lambda data: data[:1000], 2, "truncated"),
    "damaged": (lambda data: data[:16] + b"{" * 4000 + data[4016:], 2, "damaged"),
}


@pytest.mark.parametrize(("edit", "status", "note"), DAMAGES.values(), ids=DAMAGES)
def test_the_readable_part_is_used(folder, tmp_path, edit, status, note, capsys):
    """One line for what can't be read."""
    ring = next(folder.glob("*.ring"))
    (tmp_path / ring.name).write_bytes(edit(bytearray(ring.read_bytes())))
    assert _cli.main(["analyze", str(tmp_path)]) == status
    said = capsys.readouterr()
    assert note in (said.err if status else said.out)
    assert len(said.err.splitlines()) == status


def test_without_recorder_and_with_a_full_disk(tmp_path):
    """The program works; a folder that cannot hold the file is one warning."""
    done = run(CALLS + "try: recorder.trace('').__enter__()\nexcept RuntimeError: print(recorder.stats().sites)", "")
    assert done.stdout == "()\n" and "recorder" not in done.stderr
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    done = run(full + CALLS + "print('works')", tmp_path)
    assert done.stdout == "works\n" and done.stderr.count("warning: jaxcomm:") == 1, done.stderr
    assert "cannot allocate" in done.stderr and not list(tmp_path.iterdir())


def test_the_default_folder_keeps_the_files_of_failures(tmp_path):
    ends_well = run(CALLS, None, TMPDIR=str(tmp_path))
    (folder,) = tmp_path.glob("jaxcomm-recorder-*")
    assert ends_well.returncode == 0 and not list(folder.iterdir())
    run(CALLS + "raise KeyError('secret')", None, TMPDIR=str(tmp_path))
    assert _file.read(next(folder.glob("*.ring"))).state == "ended (KeyError)"
    assert recorder.analyze(folder).verdict == "ok"


GATHER = {"text": "all_gather at a.py:7 (f)", "algorithm": "ring", "calls": 4, "failed": 1, "bytes": 6_000_000}
NAMES = "arrived_ns", "started_ns", "running_ns", "ended_ns"


def made(number, phase, *at_s, **more):
    """A call of six ranks: times of arrival, start, run and end."""
    times = {name: int(at * S) for name, at in zip(NAMES, at_s, strict=True)}
    counts = {"input_count": 1024, "output_count": 6144, "sequence": number}
    return times | counts | {"phase": phase, "key": number, "site": GATHER, "arrived": (), **more}


DONE, ENTERED = made(5, "done", 1, 2, 3, 7, arrived=(2, 3)), made(6, "entry barrier", 8, 9, 0, 0)
HANGS = made(5, "running", 8, 9, 0, 0, iteration=3)
BEFORE = {**HANGS, "key": 4, "sequence": 4, "input_count": 8}
ARRIVES = made(8, "arriving", 19, 0, 0, 0, key=0, arrived=(2,))
# Calls of three processes, states, the window, headers, and errors; then the clock of process 1 is 100 s ahead.
FINDINGS = {
    "dead, and no file": ([[], []], ("unknown", "dead"), 60, {}, {}),
    "all are dead": ([[], [], []], ("dead",) * 3, 1, {}, {}),
    "versions": ([[], [], []], ("dead",) * 3, 1, {"version_text": "212"}, {}),
    "idle": ([[made(5, "done", 0, 0, 0, at)] for at in (8, 5, 2)], ("unknown",) * 3, 12, {}, {}),
    "not idle": ([[made(5, "done", 0, 0, 0, at)] for at in (8, 5, 2)], ("unknown",) * 3, 13, {}, {}),
    "in flight": ([[ENTERED, HANGS]] * 3, ("unknown",) * 3, 13, {}, {}),
    "no call": ([[HANGS], [HANGS], []], ("unknown",) * 3, 1, {}, {}),
    "an earlier call": ([[HANGS], [HANGS], [made(4, "done", 6, 6, 0, 7)]], ("unknown",) * 3, 1, {}, {}),
    "another shape": ([[HANGS], [BEFORE], [HANGS]], ("unknown",) * 3, 1, {}, {}),
    "equal calls": ([[HANGS], [{**HANGS, "key": 4}], [HANGS]], ("unknown",) * 3, 1, {}, {1: [(S, "why")]}),
    "a device is missing": ([[], [{**ARRIVES, "arrived_ns": S}], []], ("unknown",) * 3, 1, {}, {}),
    "a link": ([[HANGS]] * 3, ("unknown",) * 3, 1, {"node": "001"}, {}),
    "no progress": ([[HANGS]] * 3, ("unknown",) * 3, 1, {"node": "000"}, {}),
    "errors": ([[HANGS], [HANGS], [HANGS]], ("unknown",) * 3, 1, {}, {0: [(2 * S, "late")], 1: [(101 * S, "early")]}),
}


def by_hand(folder, calls_of, states=("unknown",) * 3, headers=(), errors=()):
    run = in_states(rings_of(folder, calls_of, 3), states[: len(calls_of)], (20,) * len(calls_of))
    run.offset_ns = {process: -100 * S * (process == 1 and bool(errors)) for process in run.rings}
    group = _file.Group(1, tuple(range(6)), (0, 0, 1, 1, 2, 2))
    for process, ring in run.rings.items():
        ring.header |= {"host": f"host{process // 2}", "pid": process, "started_ns": 0, "node": "0"}
        ring.header |= {name: text[process] for name, text in dict(headers).items()}
        ring.errors, ring.sequences = dict(errors).get(process, []), {1: 3}
        ring.sites = [] if process == 2 else [dataclasses.replace(ring.sites[0], group=group, **GATHER)]
    return run


def texts(folder, tmp_path):
    """By title."""
    run = by_hand(folder, [[], [DONE, ENTERED, ARRIVES], []])
    run.offset_ns[1] = S
    trace = json.loads(_chrome.trace(run.rings[1], 0, {0: "0", 1: "0", 2: "1"}))
    _pytorch.export(run, tmp_path)
    dumps = [json.loads((tmp_path / "json" / "3.json").read_text()), pickle.loads((tmp_path / "rank_2").read_bytes())]
    group = _file.Group(1, (1, 3, 9, 0, 2, 4), (0, 0, 1, 1, 2, 2))  # process 1 has ranks 9 and 0
    ring = by_hand(folder, [[], [{**DONE, "site": {**GATHER, "group": group}}], []]).rings[1]
    steps = re.findall(r'"steps": .*?\]', _chrome.trace(ring, 0, {n: str(n) for n in range(3)}, steps=True))
    yield "trace", "\n".join([json.dumps(line) for line in (*trace["traceEvents"], trace["otherData"])] + steps)
    yield "export", "\n".join(json.dumps(line) for dump in dumps for line in (dump["pg_config"], *dump["entries"]))
    older, newer = made(8, "running", 5, 6, 7, 0, iteration=3), made(9, "running", 15, 15, 15, 0)
    now, before = (by_hand(folder, [[newer, older], [{**older, **ARRIVES}]]) for _ in range(2))
    before.rings[0].sites[0] = dataclasses.replace(before.rings[0].sites[0], calls=1, failed=0, bytes=2_000_000)
    for window_s, state in ((10, "unknown"), (16, "unknown"), (16, "dead")):
        now.rings[1].__dict__["state"] = state
        yield f"top, {window_s} s, {state}", str(_top.snapshot(now, before, 2, window_s))
    before.rings[0].path = folder / "earlier"  # of another program in the same folder
    yield "top of another program", str(_top.snapshot(now, before, 2, 10))
    for title, (calls_of, states, window_s, headers, errors) in FINDINGS.items():
        findings = _verdict.diagnose(by_hand(folder, calls_of, states, headers, errors), window_s)
        yield title, "\n".join(str(dataclasses.astuple(finding)) for finding in findings)
    finding = _verdict.Finding(_verdict.Verdict.NEVER_JOINED, (2,), (5, 4), (0, 1, 2), ("<line>",))
    stacks = {2: "\n".join(f"endpoint 'a' waits: open of 'b': {s} s" for s in (50.0, 9.9))}
    yield "transfers", str(_verdict.in_transfers([finding], stacks, 10))
    started = [[(1, 1), (2, 9), (3, 4)], [(1, 103), (2, 107), (3, 101), (5, 101)], [(1, 2), (2, 2), (3, 1)]]
    sites = {3: {"site": {**GATHER, "text": "b"}}}
    calls = [[made(n, "done", 0, at, 0, 0, **sites.get(n, {})) for n, at in process] for process in started]
    stragglers = _stragglers.find(by_hand(folder, calls, errors={0: []}))  # the clock of process 1 is 100 s ahead
    link = recorder.Link(((0, 1), (1, 2)), "psum at a.py:1 (f)", "ring", 7, 2e9, 4e9, 3)
    report = recorder.Report(
        "never joined", (finding,), (*stragglers,) * 2, (link,) * 6, {2: "a\nb"}, ("odd",), 3, (0, 1)
    )
    yield "report", f"{report}\n{json.dumps(json.loads(report.json()))}"
    shown = by_hand(folder, [[made(8, "done", 9, 10, 12, 14)], [], [made(9, "running", 110, 115, 115, 0)]])
    shown.offset_ns[2], shown.rings[2].header["alive_ns"] = -100 * S, 120 * S
    yield "page", _html.page(report, shown).partition("</head>")[2].replace("><", ">\n<")
    ends = [[(1, 1), (2, 2), (3, 3)], [(1, 101), (2, 103), (3, 190), (5, 0)], []]
    rings = by_hand(folder, [[made(n, "done", 0, 0, 0, at) for n, at in of] for of in ends]).rings
    for process, ring in rings.items():
        ring.header |= {"kernel": f"{process}:1", "started_unix_ns": (1000 + 50 * process) * S}
    yield "clocks", f"{_runs._offsets(rings, notes := [])}\n" + "\n".join(notes)


def test_texts(folder, tmp_path):
    """Whole texts, of calls written by hand. Those of the file were checked by hand, too."""
    found = "".join(f"## {title}\n{text}\n" for title, text in texts(folder, tmp_path))
    assert found == pathlib.Path(__file__).with_name("recorder_texts.txt").read_text()
