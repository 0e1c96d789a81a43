"""The tool of tests/mutation: results of a mutant, mistakes by hand, and the rule of the sample."""

import pytest
from mutation import hand, record, trees

USUAL = trees.Run(True, 4.0)  # so the limit is 22 seconds
MUTANT = hand.Mistake("a mistake", "models/a.py", "x = 1", "x = 2", "tests/test_a.py")


class Runner(hand.Runner):
    """Runs of the tests end as `runs` says: without the mutant, with it, and without it again."""

    def __init__(self, place, runs, log="1 passed in 4.00s"):
        self.place = self.tree = place
        self.normal, self.runs = {}, list(runs)
        (place / "models").mkdir()
        (place / "models/a.py").write_text("x = 1\n")
        (place / "test.log").write_text(log)

    def passes(self, mutant, limit_s=hand.LIMIT_S):
        assert limit_s in (hand.LIMIT_S, 22.0)
        changed = (self.tree / mutant.file).read_text() == "x = 2\n"
        assert changed == (limit_s == 22.0)
        return self.runs.pop(0)


@pytest.mark.parametrize(
    ("runs", "result"),
    [
        ([USUAL, trees.Run(True, 5.0)], record.SURVIVED),
        ([USUAL, trees.Run(False, 5.0)], record.CAUGHT),
        ([USUAL, trees.Run(False, 22.1, True), trees.Run(True, 10.9)], record.TIMED_OUT),
        ([USUAL, trees.Run(False, 22.1, True), trees.Run(True, 11.1)], None),
        ([USUAL, trees.Run(False, 22.1, True), trees.Run(False, 1.0)], None),
        ([trees.Run(False, 4.0)], None),
        ([None], None),
    ],
)
def test_results_of_a_mutant(tmp_path, runs, result):
    runner = Runner(tmp_path, runs)
    judged = runner.judge(MUTANT)
    assert (judged and judged.result) == result
    assert runner.runs == []
