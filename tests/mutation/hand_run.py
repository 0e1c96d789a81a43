"""Runs hand-made mutants: puts each into a copy of the repository, builds the programs of its tests, and runs them.

The tests of Python sources run in forks of a process that has imported JAX.
"""

import importlib
import pathlib
import re
import shlex

from . import forks, record, trees
from .hand import Mutant

LIMIT_S = 600  # of a test without a mutant


def mutants():
    """The mutants of all modules hand_*.py."""
    names = sorted(path.stem for path in record.HERE.glob("hand_*.py") if path.stem != "hand_run")
    modules = [importlib.import_module(f"mutation.{name}") for name in names]
    return [mutant for module in modules for mutant in module.MUTANTS]


def faults():
    """Describes the mutants that no longer fit the sources."""
    found = []
    for mutant in mutants():
        times = (trees.ROOT / mutant.file).read_text().count(mutant.old)
        if times != 1:
            found.append(f"{mutant.file}: {mutant.name}: its text occurs {times} times in the file, not once")
    return found


def folder(mutant):
    parts = pathlib.Path(mutant.file).parent.parts
    return "/".join(parts[:2]) or parts[0]


def key(mutant):
    """The key of the mutant's result in the record."""
    return mutant.file, re.sub(r"\s+", " ", mutant.old).strip()[:100], mutant.name


class Runner:
    """A copy of the repository with its own builds, which later runs reuse."""

    def __init__(self, jobs, build=None):
        from . import schemata  # needs libclang, unlike the results of mutants

        self.build = build or schemata.Build(trees.BUILD / "hand", [], jobs=jobs)
        self.place, self.tree = self.build.place, self.build.tree
        self.normal, self.configured, self.modules, self.pytest = {}, set(), (), None

    def native(self, targets):
        """Builds native tests. Returns success."""
        if "native" not in self.configured:
            self.build.cmake("native", "-DJAXCOMM_NATIVE_TESTS=ON")
            self.configured.add("native")
        return self.build.ninja("native", targets)[0]

    def module(self):
        """Builds the module _core. Returns success."""
        self.modules = self.modules or self.build.module()
        return all(self.build.ninja(name, targets)[0] for name, targets in self.modules)

    def close(self):
        if self.pytest:
            self.pytest.close()

    def forked(self, mutant, limit_s):
        """Runs the tests of a mutant of Python sources, with the installed modules. Returns a trees.Run."""
        for built in trees.installed():
            trees.put(self.tree / "jaxcomm" / built.name, built.read_bytes())
        if not self.pytest:
            from . import python  # needs cosmic-ray

            self.pytest = forks.Pytest(self.tree, [name for names in python.IMPORTS.values() for name in names])
        return self.pytest.run(shlex.split(mutant.tests), limit_s, self.place / "test.log")

    def runs(self, mutant):
        """Returns [(command, folder, environment)], or None if the mutant does not compile."""
        if ".py" in mutant.tests:
            if not self.module():
                return None
            built = next((self.build.builds / "module").glob("_core*.so"))
            trees.put(self.tree / "jaxcomm" / built.name, built.read_bytes())
            return [(trees.pytest(shlex.split(mutant.tests)), self.tree, trees.python_environment(self.tree))]
        names = mutant.tests.split()
        if not self.native(names):
            return None
        tests = [test for test in self.build.programs() if test["name"] in names]
        return [(test["command"], self.place, test["environment"]) for test in tests]

    def passes(self, mutant, limit_s=LIMIT_S):
        """Runs the tests of a mutant in this tree. Returns a trees.Run, or None if the tree does not compile."""
        if ".py" in mutant.tests and not mutant.file.startswith("ffi/"):
            return self.forked(mutant, limit_s)
        runs = self.runs(mutant)
        if not runs:
            return None
        total = 0.0
        for command, place, environment in runs:
            run = trees.run(command, place, limit_s, environment, self.place / "test.log")
            total += run.seconds
            if not run.passed:
                break
        return run._replace(seconds=total)

    def usual(self, mutant):
        """Returns the seconds of the tests without the mutant, or None with a message if they do not pass."""
        if mutant.tests not in self.normal:
            run, log = self.passes(mutant), self.place / "test.log"
            fault = ""
            if run is None:
                fault = "is not built"
            elif not run.passed:
                fault = f"fails\n{trees.end(log)[-1500:]}"
            elif ".py" in mutant.tests and not trees.has_run(log):
                fault = "skips every test"
            self.normal[mutant.tests] = (run.seconds if run else 0.0), fault
        seconds, fault = self.normal[mutant.tests]
        if fault:
            print(f"{mutant.name}: without the mutant, {mutant.tests} {fault}", flush=True)
        return None if fault else seconds

    def judge(self, mutant):
        """Returns the result of a mutant, or None with a message if there is none."""
        usual = self.usual(mutant)
        if usual is None:
            return None
        original = (self.tree / mutant.file).read_text()
        if original.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.file}: {mutant.name}: its text does not occur exactly once")
        (self.tree / mutant.file).write_text(original.replace(mutant.old, mutant.new))
        try:
            limit_s = 3 * usual + 10
            run = self.passes(mutant, limit_s)
        finally:
            (self.tree / mutant.file).write_text(original)
        if run is None:
            print(f"{mutant.name}: does not compile:\n{(self.place / 'native.log').read_text()[-1500:]}", flush=True)
            return None
        if run.timed_out and not trees.is_mutant_slow(self.passes(mutant), limit_s):
            print(f"{mutant.name}: no result, the machine is slow", flush=True)
            return None
        line = original[: original.index(mutant.old)].count("\n") + 1
        _, text, _ = key(mutant)
        result = record.SURVIVED if run.passed else record.TIMED_OUT if run.timed_out else record.CAUGHT
        tests = "" if run.passed else mutant.tests
        return record.Result(
            folder(mutant), mutant.file, line, "hand", text, mutant.name, result, tests, round(run.seconds, 1)
        )


def choose(count, seed, folders, only=None, new=False):
    """Selects `count` mutants of each folder (0: all), or those whose "file: name" contains `only`.

    `new`: only mutants without a row in the record.
    """
    known = {row.key for row in record.read()} if new else set()
    every = [mutant for mutant in mutants() if folder(mutant) in folders and key(mutant) not in known]
    if only:
        return [mutant for mutant in every if only in f"{mutant.file}: {mutant.name}"]
    chosen = []
    for name in folders:
        own = [mutant for mutant in every if folder(mutant) == name]
        chosen += record.sample(own, count, seed, folder, lambda mutant: mutant[:2])
    return chosen


def run(chosen, jobs=2, build=None, done=None):
    """Returns the results, and the mutants without one."""
    if wrong := faults():
        raise SystemExit("\n".join(wrong))
    runner, results, unjudged = Runner(jobs, build), [], []
    folders = list(dict.fromkeys(map(folder, chosen)))

    def place(mutant):  # those that need the module of another layer come last: its build takes minutes
        slow = mutant.file.startswith("ffi/") and ".py" in mutant.tests
        return slow, folders.index(folder(mutant)), mutant.file, mutant.tests

    for mutant in sorted(chosen, key=place):
        result = runner.judge(mutant)
        if not result:
            unjudged.append(mutant)
        else:
            results.append(result)
            if done:
                done(result)
            print(f"{result.result:<10} {result.seconds:7.1f} s  {mutant.file}: {mutant.name}", flush=True)
    runner.close()
    return results, unjudged


__all__ = ["Mutant", "faults", "folder", "key", "mutants", "run"]
