"""The rungs of the bring-up of several GPUs, rehearsed on CPU devices."""

import json
import os
import pathlib
import re
import subprocess
import sys

import bring_up
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOL = ROOT / "tests" / "cuda" / "tools" / "bring_up.py"


def climb(name, out, *more):
    done = subprocess.run(
        (sys.executable, TOOL, name, out, *more), capture_output=True, text=True, timeout=900, cwd=out,
        env={**os.environ, "JAXCOMM_TIMEOUT_S": "60"},
    )  # fmt: skip
    return done.returncode, json.loads((out / f"{name}.json").read_text()), done.stdout + done.stderr


def test_the_page_lists_the_rungs():
    page = (ROOT / "docs" / "development" / "gpu-tests.md").read_text()
    assert re.findall(r"^\| `((?!gpu-)[a-z-]+)` \|", page, re.MULTILINE) == list(bring_up.RUNGS)


def test_the_programs_of_replaced_communicators(tmp_path):
    status, record, text = climb("cliques", tmp_path, "--platform", "cpu", "--patience", "3")
    assert status == 0, text
    assert record["tests"] == {"cliques": True} and record["platform"] == "cpu"
    assert record["parts"]["cliques"]["lines"] == [{"programs": 32, "devices": 8, "processes": 1}]


@pytest.mark.full
@pytest.mark.deadline(900)
@pytest.mark.parametrize("name", [name for name in bring_up.RUNGS if name != "cliques"])
def test_all_rungs(name, tmp_path):
    status, record, text = climb(name, tmp_path, "--platform", "cpu", "--patience", "10")
    assert status == 0, text
    if bring_up.RUNGS[name].program is bring_up.SELFTEST:
        assert record["selftest"]["status"] == 0
