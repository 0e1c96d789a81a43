"""The flight recorder's files of one process: counters, trace, report, page, and what of damaged files can be read.

Where a test needs more processes, it changes what one process has recorded.
"""

import dataclasses
import json
import os
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
from jaxcomm.recorder import _chrome, _cli, _file, _html, _links, _report, _runs, _stragglers, _top, _verdict


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
import jax, jax.numpy as jnp, jaxcomm
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
        "print(s.op, s.calls, s.bytes, s.ranks, 0 < s.seconds, 0 <= s.waiting_seconds <= s.seconds)\n"
        "import urllib.request\n"
        "url = f'http://127.0.0.1:{jaxcomm.recorder.serve()}/metrics'\n"
        "page = urllib.request.urlopen(url, timeout=60)\n"
        "print(page.headers['Content-Type'], page.read().decode())\n"
        "jaxcomm.recorder.dump()\n"
    ).replace("TRACE", str(folder / "trace.json"))
    done = run(code, folder, JAXCOMM_RECORDER_CALLS="4")
    assert done.returncode == 0, done.stderr
    (folder / "out").write_text(done.stdout)
    return folder


def test_counters(folder):
    lines = (folder / "out").read_text().splitlines()
    assert lines[0] == f"psum 11 {11 * 8 * 4} (0, 1) True True"
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


def test_a_dead_process_explains_failures_after_its_end(folder):
    """Both were killed. The clock of the second host is ahead by 1000 s."""
    for death_s, failure_s in ((1005, 6), (1007, 6)):
        run = rings_of(folder, [[{"phase": "failed", "key": 5, "ended_ns": failure_s * 10**9}], []])
        in_states(run, KILLED, (9, death_s))
        for offset_ns in ({0: 0, 1: -1000 * 10**9}, {0: 1000 * 10**9, 1: 0}):
            run.offset_ns = offset_ns
            died_first = _verdict._Diagnosis(run, 1.0).died_first(1, 0, run.rings[0].calls[0])
            assert died_first == (death_s - 1000 < failure_s)


S, MIB = 10**9, 1 << 20


def gathers(algorithm, processes, key, seconds):
    """An all_gather of blocks of 1 MiB over two ranks of each process. All but the first enter it after 2 s."""
    group = _file.Group(processes, tuple(range(2 * processes)), tuple(rank // 2 for rank in range(2 * processes)))
    site = {"text": "all_gather at a.py:1 (f)", "algorithm": algorithm, "group": group}
    counts = {"input_count": MIB // 4, "output_count": 2 * processes * MIB // 4}
    times = {"running_ns": 0, "ended_ns": (2 + seconds) * S, "key": key, "site": site, **counts}
    return [{**times, "arrived_ns": 0, "started_ns": (2 if process else 1) * S} for process in range(processes)]


def test_links(folder):
    """A ring of three processes gives one bound for its three pairs; a second group tells one of them from the others.

    On a ring of n ranks, a rank sends n - 1 blocks to the next one. Between two processes of two ranks, each rank sends
    its block to two others.
    """
    around = [gathers("ring", 3, key, seconds) for key, seconds in ((11, 40), (12, 10), (13, 1))]  # median: 10 s
    run = rings_of(folder, zip(*around, strict=True), num_processes=3)
    (link,) = _links.find(run)
    expected = jaxcomm.explain("all_gather", jax.ShapeDtypeStruct((MIB // 4,), jnp.float32), 6, algorithm="ring",
                               scope="node")  # fmt: skip
    assert (link.pairs, link.calls, link.bytes_per_s) == (((0, 1), (0, 2), (1, 2)), 3, 5 * MIB / 10)
    assert link.predicted_bytes_per_s == pytest.approx(5 * MIB / expected.predicted_time_s)
    assert "0-1, 0-2, 1-2 (not told apart): at least 0.000524 GB/s" in str(link)

    around = gathers("ring", 3, 11, 10)
    around[2] |= {"waiting_rank": 4, "waiting_peer": 3}  # it waits for process 1
    two = gathers("direct", 2, 21, 1)
    run = rings_of(folder, [[around[0], two[0]], [around[1], two[1]], [around[2]]], num_processes=3)
    slow, unknown, fast = _links.find(run)
    assert (slow.pairs, slow.waited, slow.bytes_per_s) == (((1, 2),), 1, 5 * MIB / 10)
    assert (unknown.pairs, unknown.waited) == (((0, 2),), 0)
    assert (fast.pairs, fast.algorithm, fast.bytes_per_s) == (((0, 1),), "direct", 4 * MIB)
    for run in (rings_of(folder, [[around[0]]], num_processes=3), rings_of(folder, [[{"key": 1}]], 1)):
        assert not _links.find(run)  # files of other processes are missing; a process has no links


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
    run = in_states(rings_of(folder, [one, other]), states, alive_s)
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


def test_stragglers_by_hand(folder):
    """Three processes; in the second call, one has not recorded it. The clock of the last one is 10 s ahead."""

    def started(key, at_s):
        return {"phase": "done", "key": key, "started_ns": at_s * 10**9}

    calls = [[started(1, 1), started(2, 20)], [started(1, 3), started(2, 30)], [started(1, 12)]]
    run = rings_of(folder, calls, 3)
    run.offset_ns[2] = -10 * 10**9
    (found,) = _stragglers.find(run)
    assert (found.process, found.last, found.calls, found.waiting_s) == (1, 1, 1, 2 + 1)


def test_clocks_by_the_calendar(folder):
    """Without common calls: the second host has started 50 s later and its clock shows 7 s."""
    run = rings_of(folder, [[], []])
    for process, (unix_s, own_s) in enumerate([(1000, 3), (1050, 7)]):
        run.rings[process].header |= {"started_unix_ns": unix_s * 10**9, "started_ns": own_s * 10**9}
    run.rings[1].header["kernel"] = "another boot:1"
    assert _runs._offsets(run.rings, []) == {0: 0, 1: (50 - 4) * 10**9}


def test_rates(folder):
    """11 calls of 32 bytes in 2 s."""
    run, before = _runs.find(folder), _runs.find(folder)
    assert _top.snapshot(run, before, elapsed_s=2, window_s=1).processes[0].calls_per_s == 0
    before.rings[0].path = folder / "earlier"  # of another program in the same folder
    (row,) = _top.snapshot(run, before, elapsed_s=2, window_s=1).processes
    assert (row.ranks, row.state, row.call) == ((0, 1), "ended (exit)", "")
    assert (row.calls_per_s, row.bytes_per_s) == (5.5, 176)


def test_report_of_a_real_trace_and_of_another_file(folder, tmp_path, capsys):
    assert _cli.main(["report", "--json", str(folder / "trace.json")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["op"], row["ranks"], row["calls"]) == ("psum", 2, 1) and row["copy_limit_us"] > 0
    (tmp_path / "other.json").write_text("[]")
    assert _cli.main(["report", str(tmp_path / "other.json")]) == 2
    assert "not a trace of jaxcomm" in capsys.readouterr().err


LATE = """
import threading, time, numpy as np, jaxcomm.recorder as recorder
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
    for pattern in ("*.ring", "*.ring.dump"):
        ring = _file.read(next(folder.glob(pattern)))
        assert [call.sequence for call in ring.calls] == [8, 9, 10, 11]
        assert all(call.phase == "done" and call.arrived == (0, 1) for call in ring.calls)
        assert ring.last_dropped(ring.sites[0].group) == 7


def test_analysis_of_a_program_that_has_ended(folder):
    report = recorder.analyze(folder)
    assert report.verdict == "ok" and json.loads(report.json())["findings"][0]["verdict"] == "ok"


def test_page(folder, tmp_path):
    """One file, well formed, with a bar for each part of each call; texts of programs are escaped."""
    page = tmp_path / "page.html"
    assert _cli.main(["analyze", str(folder), "--html", str(page)]) == 0
    root = ElementTree.fromstring(page.read_text().partition("</head>")[2].removesuffix("</html>\n"))
    assert root.find("h1/span").text == "ok" and not re.search(r"https?://|src=", page.read_text())
    (title, *_), bars = root.findall("svg/text"), root.findall("svg/rect")
    assert title.text == "process 0 (ranks 0-1), ended (exit)"
    widths = [float(bar.get("x")) + float(bar.get("width")) for bar in bars]
    assert len(bars) == 8 and max(widths) == pytest.approx(_html.WIDTH, abs=1.1)
    assert "psum at" in bars[0].find("title").text and ", done" in bars[0].find("title").text
    run, report = _runs.find(folder), recorder.analyze(folder)
    run.rings[0].calls[-1:] = [dataclasses.replace(run.rings[0].calls[-1], phase="running", ended_ns=0)]
    note = dataclasses.replace(report, notes=("<script>",))
    text = _html.page(note, run)
    assert "<script>" not in text and "&lt;script&gt;" in text and 'fill="var(--bad)"' in text


def test_export_for_pytorch(folder, tmp_path):
    assert _cli.main(["export", str(folder), "--out", str(tmp_path)]) == 0
    dump = json.loads((tmp_path / "json" / "1.json").read_text())
    (group,) = dump["pg_config"].values()
    assert dump["version"] == "2.10" and group["ranks"] == "[0, 1]"
    assert [entry["collective_seq_id"] for entry in dump["entries"]] == [8, 9, 10, 11]
    assert {entry["profiling_name"] for entry in dump["entries"]} == {"nccl:all_reduce"}
    assert (tmp_path / "rank_0").exists()


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


def test_the_latest_of_two_runs(folder, tmp_path):
    run(CALLS, tmp_path)
    ring = next(folder.glob("*.ring"))
    (tmp_path / ring.name).write_bytes(ring.read_bytes())
    report = recorder.analyze(tmp_path)
    assert any("has 2 runs; this is the latest" in note for note in report.notes)
    assert report.num_processes == 1


def test_without_recorder_and_with_a_full_disk(tmp_path):
    """The program works; a folder that cannot hold the file is one warning."""
    done = run(CALLS + "print(jaxcomm.recorder.stats().sites)", "")
    assert done.stdout == "()\n" and "recorder" not in done.stderr
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    done = run(full + CALLS + "print('works')", tmp_path)
    assert done.stdout == "works\n" and done.stderr.count("warning: jaxcomm:") == 1, done.stderr
    assert "cannot allocate" in done.stderr and not list(tmp_path.iterdir())


def test_the_default_folder_keeps_the_files_of_failures(tmp_path):
    ends_well = run(CALLS, None, TMPDIR=str(tmp_path))
    (folder,) = tmp_path.glob("jaxcomm-recorder-*")
    assert ends_well.returncode == 0 and not list(folder.iterdir())
    run(CALLS + "raise KeyError", None, TMPDIR=str(tmp_path))
    assert _file.read(next(folder.glob("*.ring"))).state == "ended (KeyError)"
    assert recorder.analyze(folder).verdict == "ok"
