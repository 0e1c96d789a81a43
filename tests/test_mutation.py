"""The tool of tests/mutation: results of a mutant, and mutants that the rules make."""

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


CXX = """
int F(int a, int b) {
  // a < b
  if (a < b && G(a, b)) return 3;
  for (;;) {
    if (a == std::min(b, 4)) break;
    total += "a < b"[a];
    Step<8>(b);
  }
}
"""
PYTHON = """
def f(a: int, b=True):
    if not a < b and f"{a < b}":
        g(a, b).x = -3
        raise KeyError
    while a + 1:
        break
"""


OF_CXX = (
    "< <=", "&& ||", "a, b b, a", "(a < b && G(a, b)) (!(a < b && G(a, b)))", "3 4", "== !=", "min max", "b, 4 4, b",
    "4 5", "(a == std::min(b, 4)) (!(a == std::min(b, 4)))", "break ", "Step<8>(b) ",
)  # fmt: skip
OF_PYTHON = (
    "True False", "a < b (a <= b)", "not a < b (a < b)", 'not a < b and f"{a < b}" (not a < b or f\'{a < b}\')',
    'not a < b and f"{a < b}" not (not a < b and f"{a < b}")', "g(a, b) (g(b, a))", "g(a, b).x = -3 pass", "-3 (3)",
    "3 4", "raise KeyError pass", "a + 1 (a - 1)", "a + 1 not (a + 1)", "1 2", "break continue",
)  # fmt: skip


@pytest.mark.parametrize(("text", "suffix", "expected"), [(CXX, "cc", OF_CXX), (PYTHON, "py", OF_PYTHON)])
def test_mutants_of_a_text(tmp_path, monkeypatch, text, suffix, expected):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PYTHON_TESTS", {"": ""})
    file = f"ffi/plan/f.{suffix}"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = (mutants.of_cxx if suffix == "cc" else mutants.of_python)(file)
    assert sorted(f"{m.old} {m.new}" for m in found) == sorted(expected)
    assert all(text[m.begin :].startswith(m.old) and m.mutated() != text for m in found)
