"""python -m tools.simulator: rows in, the same rows out; errors on standard error."""

import csv

import made
import numpy as np
import pytest
from test_fit import DENSE, SIZES, TRUTH

from tools.simulator import errors
from tools.simulator.__main__ import main


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_predict_keeps_rows_order_and_cells(tmp_path, capsys):
    columns = ("note", *made.COLUMNS[:8], "extra")
    rows = [
        {"bytes": "65536.0", "note": "lib=NCCL; a, b", "extra": 'say "x"'},
        {"hardware": "TPU v5e", "extra": ""},
        {"hardware": "8x H100", "ranks_per_node": "8", "op": "all_to_all", "extra": "1"},
        {"bytes": "65536.0", "note": "lib=NCCL; a, b", "extra": "again"},
    ]
    made.write(tmp_path / "in.csv", rows, columns)
    assert main(["predict", str(tmp_path / "in.csv"), "--out", str(tmp_path / "out.csv")]) == 0
    before, after = _rows(tmp_path / "in.csv"), _rows(tmp_path / "out.csv")
    assert [row[:-3] for row in after] == before
    assert after[0][-3:] == ["predicted_us", "low_us", "high_us"]
    assert after[2][-3:] == ["", "", ""]
    for row in (after[1], after[3]):
        predicted, low, high = map(float, row[-3:])
        assert 0 < low < predicted < high
    assert after[1][-3:] == after[4][-3:]
    error = capsys.readouterr().err
    assert "in.csv:3: declined: unknown hardware 'TPU v5e'" in error and error.count("\n") == 1


def test_validate_strict_fails_on_a_missed_target(tmp_path, capsys):
    """Times without any order: nothing can predict them."""
    random = np.random.default_rng(0)
    rows = [{**row, "time_us": f"{10 ** random.uniform(1, 4):.6g}"} for row in made.sweep(DENSE[:2], (4, 8), SIZES)]
    made.write(tmp_path / "t.csv", rows)
    command = ["validate", f"{tmp_path}/t.csv", "--hold-out", "points", "--report", f"{tmp_path}/r.md", "--strict"]
    assert main(command) == 1
    assert main([*command, "points", "interval of points"]) == 0
    assert main([*command, "points, all", "points, formulas alone, all", "interval of points"]) == 0
    assert "Targets missed: points, all; points, formulas alone, all" in capsys.readouterr().out


def test_errors_are_ratios_and_bias_has_a_sign():
    error = np.log([2.0, 2.0, 0.5, 1.0])  # measured over predicted
    found = errors.line("points", "all", error)
    assert (found.count, found.median, found.within_25) == (4, 1.0, 0.25)
    assert found.bias == pytest.approx(1 / np.sqrt(2) - 1)
    assert not found.met and errors.line("points", "all", error * 0).met
    spread = errors.line("points", "all", np.log1p(np.arange(101) / 100))
    assert (spread.median, spread.p90, spread.p95) == pytest.approx((0.5, 0.9, 0.95))


def test_new_rows_are_predicted_by_parameters_that_never_saw_them(tmp_path, capsys):
    rows = made.sweep(DENSE, (4, 8), SIZES)
    made.timed(tmp_path / "all.csv", rows, TRUTH)
    made.timed(tmp_path / "seen.csv", rows[::2], TRUTH)
    assert main(["fit", str(tmp_path / "seen.csv"), "--quick", "--out", str(tmp_path / "f.json")]) == 0
    command = ["validate", f"{tmp_path}/all.csv", "--hold-out", "new-rows", "--parameters", f"{tmp_path}/f.json"]
    assert main([*command, "--report", str(tmp_path / "r.md")]) == 0
    printed = capsys.readouterr().out
    assert "| new-rows | all | 60 |" in printed and "no rows to predict" not in printed
    assert main([command[0], str(tmp_path / "seen.csv"), *command[2:], "--report", str(tmp_path / "r.md")]) == 0
    assert "There are no rows to predict." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fit", "bad.csv"], "bad.csv:2: column ranks"),
        (["predict", "good.csv", "--out", "none/out.csv"], "none/out.csv: No such file"),
        (["predict", "good.csv", "--out", "out.csv", "--parameters", "good.csv"], "good.csv: not JSON"),
        (["predict", "done.csv", "--out", "out.csv"], "done.csv:1: column low_us is there already"),
        (["fit", "untimed.csv"], "untimed.csv: no row has a time"),
    ],
)
def test_bad_input_ends_with_its_name_and_status_2(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    made.write("bad.csv", [{"ranks": "x"}])
    made.write("good.csv", [{}])
    made.write("done.csv", [{"low_us": "1"}], (*made.COLUMNS, "low_us"))
    made.write("untimed.csv", [{"op": "ep_combine", "bytes": "", "time_us": ""}])
    assert main(command) == 2
    assert message in capsys.readouterr().err
