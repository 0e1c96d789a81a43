"""Runs the mutants of mistakes/*.toml: puts each into a copy of the repository, builds its tests, and runs them."""

import pathlib
import re
import shlex
import tomllib
from typing import NamedTuple

from . import record, trees

LIMIT_S = 600  # of a test without a mutant


class Mistake(NamedTuple):
    """A text that occurs exactly once in a file of the repository, and its replacement.

    Some mistakes show only to the tests of a build with a sanitizer: "thread:test_x".
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def mistakes():
    found = []
    for path in sorted((record.HERE / "mistakes").glob("*.toml")):
        entries = tomllib.loads(path.read_text())
        found += [Mistake(**entry) for entry in entries["mistake"]]
        for sources in entries.get("sources", ()):
            for file in sources["files"]:
                text = (trees.ROOT / file).read_text()
                found += [by_rule(rule, file, text, match, sources["tests"]) for rule in entries["rule"]
                          for match in re.finditer(rule["old"], text, re.MULTILINE)]  # fmt: skip
    return found


def by_rule(rule, file, text, match, tests):
    """The mistake that a rule makes of one place. Lines before the place make the text unique."""
    begin, (start, end) = match.start(), match.span()
    while text.count(text[begin:end]) > 1:
        begin = text.rfind("\n", 0, begin - 1) + 1
    line = text[:start].count("\n") + 1
    new = text[begin:start] + match.expand(rule["new"])
    return Mistake(f"line {line} {rule['name']}", file, text[begin:end], new, tests)


def builds(mutant):
    """{"native" or a sanitizer: the names of the programs}."""
    found = {}
    for word in mutant.tests.split():
        sanitizer, _, name = word.rpartition(":")
        found.setdefault(sanitizer or "native", []).append(name)
    return found


def fits(mutant, root=trees.ROOT):
    path = root / mutant.file
    return path.exists() and path.read_text().count(mutant.old) == 1


def folder(mutant):
    parts = pathlib.Path(mutant.file).parent.parts
    return "/".join(parts[:2]) or parts[0]


class Runner:
    """A copy of the repository with its own builds, which later runs reuse."""

    def __init__(self, jobs):
        from . import schemata  # needs libclang, unlike the results of mutants

        self.build = schemata.Build(trees.BUILD / "hand", [], jobs=jobs)
        self.place, self.tree = self.build.place, self.build.tree
        self.normal, self.configured, self.modules = {}, set(), ()

    def native(self, targets, name="native"):
        """Builds native tests, those of "native" or with the sanitizer of this name. Returns success."""
        if name not in self.configured:
            sanitizer = "" if name == "native" else name
            self.build.cmake(name, "-DJAXCOMM_NATIVE_TESTS=ON", f"-DJAXCOMM_SANITIZE={sanitizer}")
            self.configured.add(name)
        return self.build.ninja(name, targets)[0]

    def module(self):
        """Builds the module _core. Returns success."""
        self.modules = self.modules or self.build.module()
        return all(self.build.ninja(name, targets)[0] for name, targets in self.modules)

    def installed(self, mutant, limit_s):
        """Runs the tests of a mutant of Python sources, with the installed modules. Returns a trees.Run."""
        for built in trees.installed():
            trees.put(self.tree / "jaxcomm" / built.name, built.read_bytes())
        return trees.run_pytest(self.tree, shlex.split(mutant.tests), limit_s, self.place / "test.log")

    def runs(self, mutant):
        """Returns [(command, folder, environment, setup)], or None if the mutant does not compile."""
        if ".py" in mutant.tests:
            if not self.module():
                return None
            built = next((self.build.builds / "module").glob("_core*.so"))
            trees.put(self.tree / "jaxcomm" / built.name, built.read_bytes())
            command = trees.pytest(shlex.split(mutant.tests))
            return [(command, self.tree, trees.python_environment(self.tree), trees.limit)]
        runs = []
        for build, names in builds(mutant).items():
            if not self.native(names, build):
                return None
            tests = [test for test in self.build.programs(build) if test["name"] in names]
            setup = trees.limit if build == "native" else None
            runs += [(test["command"], self.place, test["environment"], setup) for test in tests]
        return runs

    def passes(self, mutant, limit_s=LIMIT_S):
        """Runs the tests of a mutant in this tree. Returns a trees.Run, or None if the tree does not compile."""
        if ".py" in mutant.tests and not mutant.file.startswith("ffi/"):
            return self.installed(mutant, limit_s)
        runs = self.runs(mutant)
        if not runs:
            return None
        total = 0.0
        for command, place, environment, setup in runs:
            run = trees.run(command, place, limit_s, environment, self.place / "test.log", setup)
            total += run.seconds
            if not run.passed:
                break
        return run._replace(seconds=total)

    def usual(self, mutant):
        """Returns the seconds of the tests without the mutant, or None with a message if they do not pass."""
        key = mutant.tests
        if key not in self.normal:
            run, log = self.passes(mutant), self.place / "test.log"
            fault = ""
            if run is None:
                fault = "is not built"
            elif not run.passed:
                fault = f"fails\n{trees.end(log)[-1500:]}"
            elif ".py" in mutant.tests and not trees.has_run(log):
                fault = "skips every test"
            self.normal[key] = (run.seconds if run else 0.0), fault
        seconds, fault = self.normal[key]
        if fault:
            print(f"{mutant.name}: without the mutant, {mutant.tests} {fault}", flush=True)
        return None if fault else seconds

    def judge(self, mutant):
        """Returns the result of a mutant, or None with a message if there is none."""
        usual = self.usual(mutant)
        if usual is None:
            return None
        original = (self.tree / mutant.file).read_text()
        (self.tree / mutant.file).write_text(original.replace(mutant.old, mutant.new))
        try:
            limit_s = 3 * usual + 10
            run = self.passes(mutant, limit_s)
        finally:
            (self.tree / mutant.file).write_text(original)
        if run is None:
            logs = (self.place / f"{build}.log" for build in builds(mutant))
            text = "".join(log.read_text()[-1500:] for log in logs if log.exists())
            print(f"{mutant.name}: does not compile:\n{text}", flush=True)
            return None
        if run.timed_out and not trees.is_mutant_slow(self.passes(mutant), limit_s):
            print(f"{mutant.name}: no result, the machine is slow", flush=True)
            return None
        line = original[: original.index(mutant.old)].count("\n") + 1
        text = " ".join(mutant.old.split())[:100]
        result = record.SURVIVED if run.passed else record.TIMED_OUT if run.timed_out else record.CAUGHT
        tests = "" if run.passed else mutant.tests
        return record.Result(
            folder(mutant), mutant.file, line, "hand", text, mutant.name, result, tests, round(run.seconds, 1)
        )


def choose(seed, folders, only=None):
    """The mistakes in these folders in the order of the seed, or those whose "file: name" contains `only`."""
    found = [mutant for mutant in mistakes() if folder(mutant) in folders]
    found = [mutant for mutant in found if not only or only in f"{mutant.file}: {mutant.name}"]
    return sorted(found, key=lambda mutant: record.order(seed, *mutant))


def run(chosen, jobs=2):
    """Returns the results, and the mistakes without one."""
    runner, results = Runner(jobs), []
    unjudged = [mutant for mutant in chosen if not fits(mutant)]
    for mutant in unjudged:
        print(f"{mutant.file}: {mutant.name}: its text does not occur exactly once", flush=True)

    def place(mutant):  # those that need the module of another layer come last: its build takes minutes
        slow = mutant.file.startswith("ffi/") and ".py" in mutant.tests
        return slow, mutant.file, mutant.tests

    for mutant in sorted((mutant for mutant in chosen if fits(mutant)), key=place):
        result = runner.judge(mutant)
        if not result:
            unjudged.append(mutant)
            continue
        results.append(result)
        print(f"{result.result:<10} {result.seconds:7.1f} s  {mutant.file}: {mutant.name}", flush=True)
    return results, unjudged
