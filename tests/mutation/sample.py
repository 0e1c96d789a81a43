"""A few mutants of the record, each against the test that caught it: what continuous integration runs.

One copy of the tree, with the generated mutants as switches; only the programs that these need are built.
"""

import re

from . import cxx, hand_run, operators, python, record, schemata, trees

SHARES = {"cxx": 11, "python": 6, "hand": 3}
SLOW_S = 15  # mutants that took longer are not taken
SLOW_TO_BUILD = re.compile(r"test_cuda_(executor|flagged|multimem)|test_communicator|test_between_nodes")


def kind(result):
    return "hand" if result.kind == "hand" else "cxx" if result.folder in cxx.TESTS else "python"


def choose(count, seed, folders):
    """Rows of the record in the order of the seed, by kind; {kind: (rows, how many of them are wanted)}."""
    rows = [row for row in record.read() if row.caught and row.seconds <= SLOW_S and not SLOW_TO_BUILD.search(row.test)]
    rows = [row for row in rows if row.folder in folders]
    rows.sort(key=lambda row: record.order(seed, *row.key))
    by_kind = {name: [row for row in rows if kind(row) == name] for name in SHARES}
    total = sum(share for name, share in SHARES.items() if by_kind[name])
    wanted = {name: round(count * share / total) if by_kind[name] else 0 for name, share in SHARES.items()}
    if total:
        most = max(wanted, key=wanted.get)
        wanted[most] += count - sum(wanted.values())
    return {name: (by_kind[name], wanted[name]) for name in SHARES}


class Runner:
    def __init__(self, jobs):
        self.jobs, self.results, self.ok = jobs, [], {}
        self.place = trees.BUILD / "sample"

    def verdict(self, row, passed, seconds):
        result = record.SURVIVED if passed else record.CAUGHT
        print(f"{result:<10} {seconds:6.1f} s  {row.file}:{row.line}: {row.change}  [{row.test}]", flush=True)
        self.results.append(row._replace(result=result, seconds=round(seconds, 1)))

    def cxx(self, rows, wanted):
        """Those that the sources still have."""
        chosen, parts = [], {}
        for row in rows:
            if len(chosen) == wanted:
                break
            if row.folder not in parts:
                first = max((part.end for part in parts.values()), default=0)
                parts[row.folder] = schemata.Sources(row.folder, first)
            match = [mutant for mutant in parts[row.folder].mutants if mutant.key == row.key]
            if match:
                chosen.append((row, match[0]))
        if not chosen:
            return
        build = schemata.Build(self.place, [*parts.values()], {mutant.number for _, mutant in chosen}, self.jobs)
        programs = {re.match(r"tests/\w+/(\w+)", row.test).group(1) for row, _ in chosen if ".py" not in row.test}
        units = build.native(sorted(programs)) if programs else []
        if modules := {row.test for row, _ in chosen if ".py" in row.test}:
            units += build.python(sorted(modules))
        for row, mutant in chosen:
            unit = next((unit for unit in units if unit.name == row.test), None)
            if not unit or not self.usual(unit):
                print(f"{row.test}: not there, or fails without a mutant", flush=True)
                self.results.append(row._replace(result=record.SURVIVED))
                continue
            environment = {**unit.environment, "JAXCOMM_MUTANT": str(mutant.number)}
            self.verdict(row, *trees.run(unit.command, unit.folder, 3 * self.ok[unit.name] + 10, environment))

    def usual(self, unit):
        """Whether it passes without a mutant."""
        if unit.name not in self.ok:
            passed, seconds = trees.run(unit.command, unit.folder, 300, unit.environment)
            self.ok[unit.name] = seconds if passed else None
        return self.ok[unit.name] is not None

    def python(self, rows, wanted):
        if not wanted:
            return
        runner = python.Runner(1)
        tree = runner.trees.get()
        for row in rows:
            if wanted == 0:
                break
            if not (trees.ROOT / row.file).exists():
                continue
            match = [mutant for mutant in operators.mutants(trees.ROOT, row.file) if mutant.key == row.key]
            code = operators.apply(trees.ROOT, match[0]) if match else None
            if code is None:
                continue
            wanted -= 1
            if row.test not in self.ok:
                passed, seconds = runner.pytest(tree, row.test, 300)
                self.ok[row.test] = seconds if passed else None
            if self.ok[row.test] is None:
                print(f"{row.test}: not there, or fails without a mutant", flush=True)
                self.results.append(row._replace(result=record.SURVIVED))
                continue
            (tree / row.file).write_text(code)
            self.verdict(row, *runner.pytest(tree, row.test, 3 * self.ok[row.test] + 10))
            (tree / row.file).write_bytes((trees.ROOT / row.file).read_bytes())


def run(count, seed, folders, jobs=2, only=None):
    runner = Runner(jobs)
    for name, (rows, wanted) in choose(count, seed, folders).items():
        if only not in (None, name):
            continue
        if name == "hand":
            names = {row.change for row in rows[:wanted]}
            runner.results += hand_run.run(0, seed, jobs, names=names) if names else []
        else:
            getattr(runner, name)(rows, wanted)
    return runner.results
