"""The analysis of the flight recorder's files names the cause of each failure, and the ranks that are behind.

The table comes first: scenario, verdict, processes that cause it. Processes run failing.py until they hang or have
raised; the files are read meanwhile. Launches run side by side.
"""

import concurrent.futures
import dataclasses
import itertools
import json

import pytest
from ranks import LONG, analyzed

from jaxcomm import recorder
from jaxcomm.recorder import _cli, _runs, _verdict

# Of failing.py and recorder_failing.py: verdict, processes that cause it, ranks behind (two for each process), part of
# the text. Processes whose programs differ raise after JAXCOMM_WARN_S; the others hang for a minute. test_failures.py
# and tests/hosts/test_recorder_hosts.py have other causes.
HANGS = {
    "stopped": ("stuck outside a collective", (1,), (2, 3), "is stopped"),
    "different_numbers_of_runs": ("stuck outside a collective", (1,), (2, 3), "runs and is in no collective"),
    "crossed_groups": ("deadlock across groups", (0, 1), (0, 1), "waits in psum"),
    "one_iteration_less": ("stuck outside a collective", (1,), (2, 3), "the_next_part_of_the_program"),
    "killed_in_a_collective": ("process dead", (1,), (2, 3), "was killed or has crashed"),
    "killed_during_bootstrap": ("dump missing", (1,), (), "have no file"),
    "killed_in_a_collective of the coordinator": ("process dead", (0,), (0, 1), "was killed or has crashed"),
}


def hangs(start, scenario):
    warned = scenario == "one_iteration_less"  # the rank that waits asks for the stacks
    name, coordinated, _ = scenario.partition(" of ")
    more = {"VICTIM": "0"} if coordinated else {}
    ranks = start(name, 3 if coordinated else 2, **LONG, **more, JAXCOMM_WARN_S="1" if warned else "30")
    return ranks, analyzed(ranks, HANGS[scenario], stacks=not warned)


DEFAULT = ["stopped", "crossed_groups", "one_iteration_less", "killed_in_a_collective"]


# As `top` shows them meanwhile. Of crossed groups, each process misses the other one.
MISSING = {
    "stopped": [2, 3],
    "crossed_groups": [0, 1],
    "one_iteration_less": [2, 3],
}


def top_of(ranks, missing, capsys):
    assert _cli.main(["top", "--once", "--json", "--interval", "0.1", str(ranks[0].folder)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["missing_ranks"] == missing
    return found


def test_hangs(start, capsys):
    """Those of the default size side by side; the cause is named while the processes hang."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        launches = dict(pool.map(lambda scenario: (scenario, hangs(start, scenario)[0]), DEFAULT))
    for scenario in MISSING.keys() & set(DEFAULT):
        waiting = top_of(launches[scenario], MISSING[scenario], capsys)["processes"][0]
        assert waiting["call"].startswith("psum at") and waiting["waiting_s"] >= 1 and not waiting["calls_per_s"]
    folders = {scenario: ranks[0].folder for scenario, ranks in launches.items()}
    for rank in itertools.chain(*launches.values()):
        rank.close()
    # After all were killed, the files still say why the program had not gone on. A stopped one has died early.
    for scenario in set(DEFAULT) - {"stopped"}:
        for window_s in (0.5, 60):
            assert recorder.analyze(folders[scenario], window_s=window_s).verdict == HANGS[scenario][0]
    # So they do if a process was killed later, which had noticed the death of the other one.
    run = _runs.find(folders["crossed_groups"])
    done = [(p, c) for p, ring in run.rings.items() for c in ring.calls if c.phase == "done"]
    assert done and all([*call.arrived] == call.group.ranks_of(process) for process, call in done)
    run.rings[0].header["alive_ns"] -= 5 * 10**9
    calls, ended_ns = run.rings[1].calls, run.rings[1].header["alive_ns"]
    calls[-1] = dataclasses.replace(calls[-1], phase="failed", ended_ns=ended_ns)
    assert _verdict.diagnose(run, window_s=60)[0].verdict.value == HANGS["crossed_groups"][0]
    # And if a process was stopped. The death of a process would have failed its call.
    run = _runs.find(folders["stopped"])
    run.rings[0].header["alive_ns"] += 20 * 10**9
    finding = _verdict.diagnose(run, window_s=60)[0]
    assert (finding.verdict.value, finding.behind) == ("stuck outside a collective", (2, 3))
    assert "was stopped: it gave no more signs" in finding.lines[0]


@pytest.mark.full
@pytest.mark.parametrize("scenario", sorted(HANGS.keys() - set(DEFAULT)))
def test_each_hang(start, scenario, capsys):
    ranks, _ = hangs(start, scenario)
    if scenario in MISSING:
        top_of(ranks, MISSING[scenario], capsys)
