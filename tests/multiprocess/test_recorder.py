"""The analysis of the flight recorder's files names the cause of each failure, and the ranks that are behind.

The table comes first: scenario, verdict, processes that cause it. Processes run failing.py until they hang or have
raised; the files are read meanwhile. Launches run side by side.
"""

import concurrent.futures
import dataclasses
import json
import os
import time

import pytest
from ranks import DEADLINE_S, LONG

from jaxcomm import recorder
from jaxcomm.recorder import _cli, _runs, _verdict

# Of failing.py and recorder_failing.py: verdict, processes that cause it, ranks behind (two for each process), part of
# the text. Processes whose programs differ raise after JAXCOMM_WARN_S; the others hang for a minute.
SOON = {**LONG, "JAXCOMM_WARN_S": "0.6"}
BOTH = (0, 1, 2, 3)
HANGS = {
    "stopped": ("stuck outside a collective", (1,), (2, 3), "is stopped"),
    "different_numbers_of_runs": ("stuck outside a collective", (1,), (2, 3), "runs and is in no collective"),
    "crossed_groups": ("deadlock across groups", (0, 1), (0, 1), "waits in psum"),
    "never_joined": ("never joined", (1,), (2, 3), "pmax at recorder_failing.py"),
    "one_iteration_less": ("stuck outside a collective", (1,), (2, 3), "the_next_part_of_the_program"),
    "slow_disk": ("stuck outside a collective", (1,), (2, 3), "in write_checkpoint"),
    "raises_before_the_call": ("process dead", (1,), (2, 3), "has ended (KeyError)"),
    "killed_in_a_collective": ("process dead", (1,), (2, 3), "was killed or has crashed"),
    "killed_between_collectives": ("process dead", (1,), (2, 3), "was killed or has crashed"),
    "another_version": ("other version", (0, 1), (), "99.0"),
    "killed_during_bootstrap": ("dump missing", (1,), (), "have no file"),
    "stopped_in_one_shot": ("stuck outside a collective", (1,), (2, 3), "is stopped"),
    "stopped_while_its_data_lands": ("stuck outside a collective", (1,), (2, 3), "is stopped"),
    "killed_in_one_shot": ("process dead", (1,), (2, 3), "was killed or has crashed"),
    "killed_while_large_data_move": ("process dead", (1,), (2, 3), "was killed or has crashed"),
    "killed_while_reshard_runs": ("process dead", (1,), (2, 3), "was killed or has crashed"),
    "stopped_while_reshard_runs": ("stuck outside a collective", (1,), (2, 3), "is stopped"),
    "full_shared_memory": ("failed call", (1,), (2, 3), "of shared memory"),
    "one_after_the_other_is_killed": ("process dead", (2,), (4, 5), "was killed or has crashed"),
    "killed_in_a_collective of the coordinator": ("process dead", (0,), (0, 1), "was killed or has crashed"),
    "killed_between_collectives of the coordinator": ("process dead", (0,), (0, 1), "was killed or has crashed"),
    "coordinator_killed_during_bootstrap": ("process dead", (0,), (), "was killed or has crashed"),
}
# One after the other in one launch: all processes live on.
ERRORS = {
    "different_ops": ("other call", (0, 1), BOTH, "pmax at failing.py"),
    "different_shapes": ("other shape or dtype", (0, 1), BOTH, "4 -> 4 elements"),
    "different_dtypes": ("other shape or dtype", (0, 1), BOTH, "of int32"),
    "different_algorithms": ("other call", (0, 1), BOTH, "direct"),
    "different_orders": ("other order", (0, 1), BOTH, "psum at failing.py"),
    "different_trip_counts": ("other call", (0, 1), BOTH, "in another program or execution"),
    "different_algorithms_of_route_and_dispatch": ("other call", (0, 1), BOTH, "is in moe.route at"),
    "different_algorithms_of_combine": ("other call", (0, 1), BOTH, "in another program or execution"),
    "no_descriptors_left": ("failed call", (1,), (2, 3), "memfd_create"),
}


def analyzed(folder, expected, **options):
    """Waits for the verdict. Before it, the processes have not come so far. processes None: any may have noticed it."""
    verdict, processes, behind, part = expected
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            report = recorder.analyze(folder, window_s=1.0, **options)
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


def hangs(start, folder, scenario):
    own = folder / scenario
    own.mkdir()
    os.mkfifo(own / "fifo")
    more = {"FIFO": str(own / "fifo"), "JAXCOMM_RECORDER": str(own)}
    warned = scenario == "one_iteration_less"  # the rank that waits asks for the stacks
    more["JAXCOMM_WARN_S"] = "1" if warned else "30"
    if coordinated := "coordinator" in scenario or scenario.startswith("one_after"):
        more["VICTIM"] = "0"
    nodes = "ab" if scenario == "stopped_while_its_data_lands" else ""
    ranks = start(scenario.partition(" of ")[0], 3 if coordinated else 2, nodes=nodes, **LONG, **more)
    return ranks, analyzed(own, HANGS[scenario], stacks=not warned)


DEFAULT = ["stopped", "crossed_groups", "one_iteration_less", "killed_in_a_collective"]


# As `top` shows them meanwhile. Of crossed groups, each process misses the other one.
MISSING = {
    "stopped": [2, 3],
    "crossed_groups": [0, 1],
    "one_iteration_less": [2, 3],
    "never_joined": [2, 3],
    "killed_between_collectives": [2, 3],
}


def top_of(folder, missing, capsys):
    assert _cli.main(["top", "--once", "--json", "--interval", "0.1", str(folder)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["missing_ranks"] == missing
    return found


def test_hangs(start, tmp_path, capsys):
    """Those of the default size side by side; the cause is named while the processes hang."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        launches = list(pool.map(lambda scenario: hangs(start, tmp_path, scenario), DEFAULT))
    for scenario in MISSING.keys() & set(DEFAULT):
        waiting = top_of(tmp_path / scenario, MISSING[scenario], capsys)["processes"][0]
        assert waiting["call"].startswith("psum at") and waiting["waiting_s"] >= 1 and not waiting["calls_per_s"]
    for ranks, _ in launches:
        for rank in ranks:
            rank.close()
    # After all were killed, the files still say why the program had not gone on. A stopped one has died early.
    for scenario in set(DEFAULT) - {"stopped"}:
        for window_s in (0.5, 60):
            assert recorder.analyze(tmp_path / scenario, window_s=window_s).verdict == HANGS[scenario][0]
    # So they do if a process was killed later, which had noticed the death of the other one.
    run = _runs.find(tmp_path / "crossed_groups")
    run.rings[0].header["alive_ns"] -= 5 * 10**9
    calls, ended_ns = run.rings[1].calls, run.rings[1].header["alive_ns"]
    calls[-1] = dataclasses.replace(calls[-1], phase="failed", ended_ns=ended_ns)
    assert _verdict.diagnose(run, window_s=60)[0].verdict.value == HANGS["crossed_groups"][0]
    # And if a process was stopped. The death of a process would have failed its call.
    run = _runs.find(tmp_path / "stopped")
    run.rings[0].header["alive_ns"] += 20 * 10**9
    finding = _verdict.diagnose(run, window_s=60)[0]
    assert (finding.verdict.value, finding.behind) == ("stuck outside a collective", (2, 3))
    assert "was stopped: it gave no more signs" in finding.lines[0]


@pytest.mark.full
@pytest.mark.parametrize("scenario", sorted(HANGS.keys() - set(DEFAULT)))
def test_each_hang(start, tmp_path, scenario, capsys):
    _, report = hangs(start, tmp_path, scenario)
    if scenario in MISSING:
        top_of(tmp_path / scenario, MISSING[scenario], capsys)
    assert "secret" not in str(report)


def test_errors_of_calls_that_differ(start, tmp_path):
    """The processes have raised and wait for the parent. Their dumps say the same as their rings."""
    ranks = start(" works_again ".join([*ERRORS, ""]), 2, JAXCOMM_RECORDER=str(tmp_path), **SOON)
    for expected in ERRORS.values():
        for rank in ranks:
            rank.wait_for("error")
        analyzed(tmp_path, expected)
        if expected[0] != "failed call":  # that process could not open a file
            analyzed(tmp_path, expected, dumps=True)
        for rank in ranks:
            rank.go_on()
        for rank in ranks:
            rank.wait_for("works again")
    for rank in ranks:
        rank.wait_for("end")
    assert recorder.analyze(tmp_path, window_s=60).verdict == "ok"


# The processes wait for the parent after each of their errors: how many, and the verdict on each.
SERIES = {
    "different_shapes": (1, ERRORS["different_shapes"], {"STARTED": "1"}),
    "wrong_routing": (1, ("failed call", (1,), (2, 3), "does not belong to this rank"), {}),
    "tampered_routings": (8, ("failed call", None, None, ": jaxcomm: moe."), {}),
    "moe_of_different_numbers": (10, ("other call", (0, 1), BOTH, "is in moe.route"), {}),
}


@pytest.mark.full
@pytest.mark.parametrize("scenario", SERIES)
def test_each_error(start, tmp_path, scenario):
    number, expected, more = SERIES[scenario]
    ranks = start(scenario, 2, JAXCOMM_RECORDER=str(tmp_path), WAITS="1", **SOON, **more)
    for _ in range(number):
        for rank in ranks:
            rank.wait_for("error")
        analyzed(tmp_path, expected)
        analyzed(tmp_path, expected, dumps=True)
        for rank in ranks:
            rank.go_on()


@pytest.mark.full
def test_messages_with_another_token(start, tmp_path):
    """Processes whose messages are refused hear nothing."""
    said = [rank.wait_for("listens") for rank in start("watched_by_strangers", 2, nodes="ab")]
    more = {"REAL_ADDRESSES": json.dumps([one["address"] for one in said]), "WAITS": "1"}
    for rank in start("has_another_token", 2, nodes="ab", JAXCOMM_RECORDER=str(tmp_path), **more):
        rank.wait_for("error")
    analyzed(tmp_path, ("cut link", (0, 1), (2, 3), "gets nothing from process 1"))
