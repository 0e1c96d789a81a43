"""Examples: a trainer and generators compare their weights, two jobs their texts with those of one job."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def job(name, versions, digests):
    records = [{"what": "generate", "version": v, "digest": d} for v, d in zip(versions, digests, strict=True)]
    return types.SimpleNamespace(name=name, records=records, versions=lambda: versions)


@pytest.mark.parametrize(
    "versions, digests, message", [([20, 40], "aa", "other weights"), ([40, 20], "ba", "back to an older version")]
)
def test_mixed_and_older_weights_fail(versions, digests, message, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.disaggregated import weights

    with pytest.raises(AssertionError, match=message):
        weights.check([job("trainer", [20, 40], "ab"), job("generator-0", versions, digests)])


@pytest.mark.full
def test_generator_that_is_killed_comes_back(tmp_path):
    picture = tmp_path / "weights.png"
    command = [sys.executable, "-m", "examples.disaggregated.weights", "--every", "5", "--timeline", str(picture)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr
    number = r"[1-9]\d*"
    lines = [rf"generator-{i}: {number} texts, {number} versions, each equal to the trainer's\n" for i in (0, 1, 1)]
    assert re.fullmatch("".join(lines), run.stdout), run.stdout
    assert picture.stat().st_size > 0


@pytest.mark.full
def test_two_jobs_write_the_text_of_one():
    command = [sys.executable, "-m", "examples.disaggregated.disaggregated", "--tokens", "8"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{n} bytes of prompt, 8 more: equal to one job's" for n in (16, 44, 1)]
