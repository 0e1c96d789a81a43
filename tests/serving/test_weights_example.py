"""The example of a trainer and two generators, which compares their weights with the trainer's."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def job(name, records):
    versions = [record["version"] for record in records]
    return types.SimpleNamespace(name=name, records=records, versions=lambda: versions)


@pytest.mark.parametrize(
    "records, message",
    [
        ([{"version": 20, "digest": "a"}, {"version": 40, "digest": "a"}], "other weights"),
        ([{"version": 40, "digest": "b"}, {"version": 20, "digest": "a"}], "back to an older version"),
    ],
)
def test_mixed_and_older_weights_fail(records, message, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.disaggregated import weights

    trainer = job("trainer", [{"version": 20, "digest": "a"}, {"version": 40, "digest": "b"}])
    reader = job("generator-0", [{"what": "generate", **record} for record in records])
    with pytest.raises(AssertionError, match=message):
        weights.check([trainer, reader])


@pytest.mark.full
def test_generator_that_is_killed_comes_back(tmp_path):
    picture = tmp_path / "weights.png"
    command = [sys.executable, "-m", "examples.disaggregated.weights", "--every", "5", "--timeline", str(picture)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    number = r"[1-9]\d*"
    lines = [rf"generator-{i}: {number} texts, {number} versions, each equal to the trainer's\n" for i in (0, 1, 1)]
    assert re.fullmatch("".join(lines), run.stdout), run.stdout
    assert picture.stat().st_size > 0
