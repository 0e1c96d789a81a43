"""Mutants of the C++ sources, generated from the syntax, all in one build: which ones do the tests catch?"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import threading
from typing import NamedTuple

from . import record, syntax, trees

NUMBERS_PER_FILE = 5000
DEVICE = re.compile(r"JAXCOMM_(DEVICE|BOTH|EMULATION)|__device__|__global__")


class Tests(NamedTuple):
    """What runs for a folder: CTest's programs of folders of tests/, then pytest, each entry a run of its own."""

    native: tuple
    python: tuple = ()
    module: bool = True  # whether the Python tests need it mutated


PSUM = "tests/ops/test_psum.py"
TESTS = {
    "ffi/plan": Tests(("plan",), ("tests/plan/test_select.py", "tests/plan/test_cost.py", "tests/plan/test_validate.py")),
    "ffi/cpu": Tests(("cpu", "transport")),
    "ffi/transport": Tests(("transport", "cpu")),
    "ffi/common": Tests(("plan", "cpu"), ("tests/ops/test_psum.py",)),
    "ffi/handlers": Tests((), ("tests/ops", "tests/test_errors.py", "tests/test_compilation.py")),
    "ffi/cuda": Tests(("cuda",)),
}
PYTEST_SECONDS = 30  # at most of each file for each mutant, the cheapest tests first
NOT_RUN = re.compile(r"mutants")  # a test that breaks the code itself


class Mutant(NamedTuple):
    number: int
    file: str
    line: int
    kind: str
    text: str
    change: str


class Unit(NamedTuple):
    """One run of a test program, of a case of it, or a file of pytest."""

    name: str
    command: tuple
    folder: str
    environment: dict
    pytest: bool = False


class Coverage(NamedTuple):
    """Of a unit without a mutant: seconds, the switches asked, and for pytest (name, seconds, switches) of its tests."""

    seconds: float
    reached: set
    outside: set = frozenset()
    tests: tuple = ()


class Schemata:
    def __init__(self, folder, jobs=2, only_files=None):
        self.folder = folder
        self.jobs = jobs
        self.place = trees.BUILD / folder.replace("/", "-")
        self.tree = self.place / "tree"
        self.place.mkdir(parents=True, exist_ok=True)
        paths = [path for path in sorted((trees.ROOT / folder).iterdir()) if path.suffix in (".cc", ".h")]
        paths = [path for path in paths if not (path.suffix == ".h" and DEVICE.search(path.read_text()))]
        units = [path for path in paths if path.suffix == ".cc"]
        if folder == "ffi/common":
            units = sorted((trees.ROOT / "ffi/cpu").glob("*.cc"))
        self.sources = syntax.read(units, {str(path) for path in paths})
        self.mutants, self.edits = [], {}
        for index, (path, source) in enumerate(sorted(self.sources.items())):
            name = str(pathlib.Path(path).relative_to(trees.ROOT))
            if only_files and name not in only_files:
                continue
            for i, edit in enumerate(source.edits[:NUMBERS_PER_FILE]):
                number = index * NUMBERS_PER_FILE + i
                text = source.line_text(edit.begin)
                self.mutants.append(Mutant(number, name, source.line(edit.begin), edit.kind, text, edit.change))
                self.edits[number] = (path, i)
        self.dropped = self.remembered()
        self.numbers = (len(self.sources) + 1) * NUMBERS_PER_FILE

    def remembered(self):
        """Those that did not compile the last time."""
        path = self.place / "dropped.json"
        known = {tuple(key) for key in json.loads(path.read_text())} if path.exists() else set()
        return {mutant.number for mutant in self.mutants if mutant[1:] in known}

    def write(self):
        changed = {}
        for path, source in self.sources.items():
            chosen = {i: n for n, (file, i) in self.edits.items() if file == path and n not in self.dropped}
            changed[str(pathlib.Path(path).relative_to(trees.ROOT))] = source.render(chosen).encode()
        trees.copy(self.tree, changed)

    def drop(self, output):
        """Forgets the mutants on the lines that the compiler complains of. Returns how many."""
        found = set()
        for strict in (True, False):
            pattern = r"^(\S+?):(\d+)(?::\d+)?: (?:fatal )?error: " if strict else r"(\S+?\.(?:cc|h)):(\d+)"
            for match in re.finditer(pattern, output, re.MULTILINE):
                path = os.path.normpath(os.path.join(self.place / "native", match.group(1)))
                if path.startswith(str(self.tree)):
                    found.add((os.path.relpath(path, self.tree), int(match.group(2))))
            before = len(self.dropped)
            for number, (path, i) in self.edits.items():
                source = self.sources[path]
                name = str(pathlib.Path(path).relative_to(trees.ROOT))
                if any((name, line) in found for line in source.inserting_lines(source.edits[i])):
                    self.dropped.add(number)
            if len(self.dropped) > before:
                return len(self.dropped) - before
        return 0

    def cmake(self, name, *options):
        flags = f"-O1 -g0 -DNDEBUG -w -include {self.tree / 'tests/mutation/switches.h'}"
        command = [trees.BIN / "cmake", "-S", self.tree, "-B", self.place / name, "-G", "Ninja"]
        command += [f"-DCMAKE_MAKE_PROGRAM={trees.BIN / 'ninja'}", "-DCMAKE_BUILD_TYPE=Mutants"]
        command += [f"-DPython_EXECUTABLE={trees.BIN / 'python'}", f"-DCMAKE_CXX_FLAGS={flags}", "-DJAXCOMM_CUDA=OFF"]
        done = subprocess.run([*map(str, command), *options], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)

    def compile(self, name, targets):
        """Until all that is left compiles."""
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.place), "CCACHE_NOHASHDIR": "1"}
        command = [trees.BIN / "ninja", "-C", self.place / name, "-k", "0", "-j", self.jobs, *targets]
        for _ in range(12):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
            if done.returncode == 0:
                return
            (self.place / f"{name}.log").write_text(done.stdout)
            dropped = self.drop(done.stdout)
            print(f"{self.folder}: {dropped} mutants do not compile", flush=True)
            if not dropped:
                break
            kept = [mutant[1:] for mutant in self.mutants if mutant.number in self.dropped]
            (self.place / "dropped.json").write_text(json.dumps(kept))
            self.write()
        raise SystemExit(f"{self.folder}: see {self.place / name}.log")

    def build(self, python=True):
        """Returns the units."""
        tests = TESTS[self.folder]
        self.write()
        units = []
        if tests.native:
            self.cmake("native", "-DJAXCOMM_NATIVE_TESTS=ON")
            self.compile("native", [f"tests/{folder}/all" for folder in tests.native])
            units += [unit for test in self.programs(tests.native) for unit in self.units(test)]
        if tests.python and python:
            self.cmake("module")
            self.compile("module", ["_core"])
            (built,) = (self.place / "module").glob("_core*.so")
            trees.put(self.tree / "jaxcomm" / built.name, built.read_bytes())
            environment = trees.python_environment(self.tree)
            for arguments in tests.python:
                units.append(Unit(arguments, tuple(trees.pytest(arguments.split(" "))), str(self.tree), environment, True))
        return units

    def programs(self, folders):
        command = [trees.BIN / "ctest", "--test-dir", self.place / "native", "--show-only=json-v1"]
        listed = subprocess.run(list(map(str, command)), capture_output=True, text=True).stdout
        chosen = []
        for test in trees.parse_tests(listed):
            here = pathlib.Path(test["command"][0]).parent.name in folders
            if here and "full" not in test["labels"] and not NOT_RUN.search(test["name"]):
                chosen.append(test)
        return chosen

    def units(self, test):
        """One for each case, where the program can list them."""
        program, *arguments = test["command"]
        environment, folder = test["environment"], str(self.place)
        name = f"tests/{pathlib.Path(program).parent.name}/{test['name']}"
        try:
            done = subprocess.run([program, "--list"], capture_output=True, cwd=folder, timeout=30)
            cases = [case for case in done.stdout.splitlines() if case]
        except subprocess.TimeoutExpired:  # it knows no options and runs everything
            cases = []
        contents = pathlib.Path(program).read_bytes()
        if not cases or not all(case in contents for case in cases):
            return [Unit(name, tuple(test["command"]), folder, environment)]
        return [Unit(f"{name}: {case.decode()}", (program, case.decode()), folder, environment) for case in cases]


def cover(schemata, units):
    """Runs each unit without a mutant: {its name: Coverage}."""
    covered = {}
    for unit in units:
        path, tests, log = (schemata.place / name for name in ("coverage", "tests.json", "test.log"))
        path.write_bytes(bytes(schemata.numbers))
        tests.unlink(missing_ok=True)
        environment = {**unit.environment, "JAXCOMM_MUTANT_COVERAGE": str(path)}
        command = unit.command
        if unit.pytest:
            environment["JAXCOMM_MUTANT_TESTS"] = str(tests)
            command = (*command, "-p", "mutation.per_test")
        passed, seconds = trees.run(command, unit.folder, 900, environment, log)
        if not passed:
            print(f"{unit.name} fails without a mutant:\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            continue
        reached = {i for i, byte in enumerate(path.read_bytes()) if byte}
        covered[unit.name] = Coverage(seconds, reached)
        if unit.pytest:
            found = json.loads(tests.read_text())
            each = tuple((name, duration, set(switches)) for name, duration, switches in found["tests"])
            outside = set(found["outside"])
            covered[unit.name] = Coverage(seconds, outside.union(*(test[2] for test in each)), outside, each)
        print(f"{seconds:7.1f} s  {len(covered[unit.name].reached):6} reached  {unit.name}", flush=True)
    return covered


def command(unit, coverage, number):
    """(what runs the tests of a unit that reach a switch, their usual seconds)."""
    if not unit.pytest:
        return unit.command, coverage.seconds
    reaching = [test for test in coverage.tests if number in test[2] or number in coverage.outside]
    chosen, total = [], 0.0
    for name, seconds, _ in sorted(reaching, key=lambda test: test[1]):
        if not chosen or total + seconds < PYTEST_SECONDS:
            chosen.append(name)
            total += seconds
    start = coverage.seconds - sum(test[1] for test in coverage.tests)
    return trees.pytest(chosen), start + total


def judge(mutant, units, covered, folder):
    """Runs the tests that reach a mutant, cheapest first, programs before pytest."""
    reaching = [unit for unit in units if unit.name in covered and mutant.number in covered[unit.name].reached]
    reaching.sort(key=lambda unit: (unit.pytest, 0 if unit.pytest else covered[unit.name].seconds))
    total, caught = 0.0, ""
    for unit in reaching:
        words, normal = command(unit, covered[unit.name], mutant.number)
        environment = {**unit.environment, "JAXCOMM_MUTANT": str(mutant.number)}
        log = pathlib.Path(unit.folder).parent / f"{threading.get_ident()}.log" if unit.pytest else None
        passed, seconds = trees.run(words, unit.folder, 3 * normal + 10, environment, log)
        total += seconds
        if not passed:
            caught = trees.failed(log) or unit.name
            break
    result = record.CAUGHT if caught else record.SURVIVED if reaching else record.NOT_REACHED
    return record.Result(folder, *mutant[1:], result, caught, round(total, 1))


def run(folder, count, seed, jobs=2, only=None, python=True):
    """The results of `count` mutants of a folder, or all with 0; of those only whose file and line contain `only`."""
    schemata = Schemata(folder, jobs)
    units = schemata.build(python)
    covered = cover(schemata, units)
    mutants = [mutant for mutant in schemata.mutants if mutant.number not in schemata.dropped]
    reached = set().union(*(coverage.reached for coverage in covered.values()))
    print(f"{folder}: {len(mutants)} mutants, {sum(m.number in reached for m in mutants)} reached", flush=True)
    chosen = record.sample(mutants, count, seed, lambda mutant: mutant.kind, lambda mutant: (mutant.file, *mutant[4:]))
    if only:
        chosen = [mutant for mutant in mutants if only in f"{mutant.file}:{mutant.line}: {mutant.change}"]
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(lambda mutant: judge(mutant, units, covered, folder), chosen):
            results.append(result)
            if not result.caught:
                print(record.describe(result), flush=True)
    return results
