"""Runs a sample of the recorded mutants, each against the test that caught it, for continuous integration.

The generated mutants of C++ are switches in one copy of the tree. Only the programs that they need are built.
Meanwhile, mutants of Python run one after the other in another copy.
"""

import concurrent.futures
import contextlib
import functools
import re

from . import cxx, forks, hand_run, operators, python, record, schemata, trees

SHARES = {"cxx": 11, "python": 6, "hand": 3}
SLOW_S = 15  # slower mutants are not in the sample
SPARE = 5  # some records may name programs that no longer exist
LIMIT_S = 300  # of a test without a mutant
SLOW_TO_BUILD = re.compile(r"test_cuda_")


def kind(result):
    return "hand" if result.kind == "hand" else "cxx" if result.folder in cxx.TESTS else "python"


def choose(count, seed, folders):
    """Returns {kind: (rows of the record in the order of the seed, size of the sample)}."""
    rows = [row for row in record.read() if row.result == record.CAUGHT and row.folder in folders]
    rows = [row for row in rows if row.seconds <= SLOW_S and not SLOW_TO_BUILD.search(row.test)]
    rows.sort(key=lambda row: record.order(seed, *row.key))
    by_kind = {name: [row for row in rows if kind(row) == name] for name in SHARES}
    total = sum(share for name, share in SHARES.items() if by_kind[name])
    wanted = {name: round(count * share / total) if by_kind[name] else 0 for name, share in SHARES.items()}
    if total:
        most = max(wanted, key=wanted.get)
        wanted[most] += count - sum(wanted.values())
    return {name: (by_kind[name], wanted[name]) for name in SHARES}


def program(row):
    """The test program that a row names, or ""."""
    found = re.match(r"tests/\w+/(\w+)(:|$)", row.test)
    return found.group(1) if found else ""


def runs(unit):
    return lambda limit_s, more: trees.run(unit.command, unit.folder, limit_s, {**unit.environment, **more})


def forked(pytest, test, log, limit_s, environment):
    return pytest.run([test], limit_s, log, environment)


def whole(unit):
    """The unit of all cases of the same program."""
    return unit._replace(command=unit.command[:1])


@contextlib.contextmanager
def changed(path, text):
    before = path.read_bytes()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_bytes(before)


class Runner:
    def __init__(self, jobs):
        self.jobs, self.results, self.ok, self.build = jobs, [], {}, None
        self.place = trees.BUILD / "sample"

    def add(self, row, passed, seconds):
        result = record.SURVIVED if passed else record.CAUGHT
        print(f"{result:<10} {seconds:6.1f} s  {row.file}:{row.line}: {row.change}  [{row.test}]", flush=True)
        self.results.append(row._replace(result=result, seconds=round(seconds, 1)))

    def judge(self, row, candidates, environment=None, prepare=None):
        """Runs the first of the candidates, (key, run), that passes without the mutant.

        `run`: limit in seconds, environment -> trees.Run.
        """
        for key, run in candidates:
            if key not in self.ok:
                usual = run(LIMIT_S, {})
                self.ok[key] = usual.seconds if usual.passed else None
            if self.ok[key] is not None:
                with prepare or contextlib.nullcontext():
                    ran = run(3 * self.ok[key] + 10, environment or {})
                return self.add(row, ran.passed, ran.seconds)
        print(f"{row.test}: missing, or fails without a mutant", flush=True)
        return self.results.append(row._replace(result=record.SURVIVED))

    def cxx(self, rows, wanted):
        """Skips rows whose mutant or test no longer exists."""
        chosen, parts = [], {}
        for row in rows:
            if len(chosen) == wanted + SPARE:
                break
            if ".py" in row.test and not (trees.ROOT / row.test.split("::")[0]).exists():
                continue
            if row.file not in parts:
                first = max((part.end for part in parts.values()), default=0)
                parts[row.file] = schemata.Sources(row.folder, first, row.file)
            match = [mutant for mutant in parts[row.file].mutants if mutant.key == row.key]
            if match:
                chosen.append((row, match[0]))
        if not chosen:
            return
        numbers = {mutant.number for _, mutant in chosen}
        self.build = build = schemata.Build(self.place, [*parts.values()], numbers, self.jobs)
        build.cmake("native", "-DJAXCOMM_NATIVE_TESTS=ON")
        targets = (self.place / "native/build.ninja").read_text()
        chosen = [pair for pair in chosen if not program(pair[0]) or f"\nbuild {program(pair[0])}: phony" in targets]
        chosen = chosen[:wanted]
        programs = sorted({program(row) for row, _ in chosen} - {""})
        units = {unit.name: unit for unit in build.native(programs)} if programs else {}
        modules = sorted(
            {test for row, _ in chosen if ".py" in row.test for test in (row.test, row.test.split("::")[0])}
        )
        if modules:
            units |= {unit.name: unit for unit in build.python(modules)}
        for row, mutant in chosen:
            candidates = [units[row.test]] if row.test in units else []
            if program(row):  # its cases may have been renamed
                same = [unit for name, unit in units.items() if name.split(":")[0] == row.test.split(":")[0]]
                candidates += [whole(unit) for unit in same[:1]]
            else:
                candidates.append(units[row.test.split("::")[0]])
            left = {"JAXCOMM_MUTANT": str(mutant.number)} if mutant in build.left() else {}
            self.judge(row, [(unit.command, runs(unit)) for unit in candidates], left)

    def python(self, rows, wanted):
        if not wanted:
            return
        tree = python.copy(0)
        pytest = forks.Pytest(tree, [name for names in python.IMPORTS.values() for name in names])
        for row in rows:
            if wanted == 0:
                break
            test = row.test.split("::")[0]
            if not (trees.ROOT / row.file).exists() or not (trees.ROOT / test).exists():
                continue
            match = [mutant for mutant in operators.mutants(trees.ROOT, row.file) if mutant.key == row.key]
            code = operators.apply(trees.ROOT, match[0]) if match else None
            if code is None:
                continue
            wanted -= 1
            candidates = [
                (name, functools.partial(forked, pytest, name, tree.with_suffix(".log"))) for name in (row.test, test)
            ]
            self.judge(row, candidates, prepare=changed(tree / row.file, code))
        pytest.close()

    def hand(self, rows, wanted):
        """Uses the copy with the generated mutants, all switched off."""
        build = self.build or schemata.Build(self.place, [], jobs=self.jobs)
        mutants = {mutant.name: mutant for mutant in hand_run.mutants()}
        rows = [row for row in rows if row.change in mutants]
        rows = [row for row in rows if (build.tree / row.file).read_text().count(mutants[row.change].old) == 1]
        runner = hand_run.Runner(self.jobs, build)
        for row in rows[:wanted]:
            result = runner.judge(mutants[row.change])
            if result is not None:  # None: the machine is slow
                self.add(row, not result.caught, result.seconds)


def run(count, seed, folders, jobs=2, only=None):
    runner = Runner(jobs)
    chosen = {name: part for name, part in choose(count, seed, folders).items() if only in (None, name)}

    def native():
        for name in ("cxx", "hand"):  # in one build folder
            if name in chosen:
                getattr(runner, name)(*chosen[name])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(runner.python, *chosen["python"]) if "python" in chosen else None
        native()
        if other:
            other.result()
    return runner.results
