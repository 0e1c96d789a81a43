"""The tool of tests/mutation: results of a mutant."""

import pytest
from mutation import mutants, runner

MUTANT = mutants.Mutant("hand", "a mistake", "models/a.py", 0, "x = 1", "x = 2", "tests/test_a.py")
USUAL = runner.Run(True, 4.0)  # so the limit is 22 seconds


class Runner(runner.Runner):
    """Runs of the tests end as `runs` says: without the mutant, with it, and without it again."""

    def __init__(self, place, runs):
        super().__init__(place)
        self.runs, self.file = list(runs), self.tree / MUTANT.file
        self.file.parent.mkdir(parents=True)
        self.file.write_text("x = 1\n")

    def passes(self, mutant, limit_s=runner.LIMIT_S):
        assert (limit_s, self.file.read_text()) in ((runner.LIMIT_S, "x = 1\n"), (22.0, "x = 2\n"))
        return self.runs.pop(0)


@pytest.mark.parametrize(
    ("runs", "result"),
    [
        ([USUAL, runner.Run(True, 5.0)], runner.SURVIVED),
        ([USUAL, runner.Run(False, 5.0)], runner.CAUGHT),
        ([USUAL, runner.Run(False, 22.1, True), runner.Run(True, 10.9)], runner.TIMED_OUT),
        ([USUAL, runner.Run(False, 22.1, True), runner.Run(True, 11.1)], None),
        ([USUAL, None], None),
        ([runner.Run(False, 4.0)], None),
        ([None], None),
    ],
)
def test_results_of_a_mutant(tmp_path, monkeypatch, runs, result):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.py").write_text("x = 1\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    own = Runner(tmp_path / "place", runs)
    assert own.judge(MUTANT) == result
    assert own.runs == [] and own.file.read_text() == "x = 1\n"
