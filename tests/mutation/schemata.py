"""Generated mutants of C++ as switches in a copy of the repository, and its builds."""

import json
import os
import pathlib
import re
import subprocess
from typing import NamedTuple

from . import syntax, trees
from .record import Mutant

NUMBERS_PER_FILE = 5000
DEVICE = re.compile(r"JAXCOMM_(DEVICE|BOTH|EMULATION)|__device__|__global__")


class Unit(NamedTuple):
    """A run of a test program, or of one of its cases."""

    name: str
    command: tuple
    folder: str
    environment: dict


def relative(path):
    return str(pathlib.Path(path).relative_to(trees.ROOT))


class Sources:
    """The mutants of a folder, or of some of its files only. Their numbers begin at `first`."""

    def __init__(self, folder, first=0, files=()):
        paths = [path for path in sorted((trees.ROOT / folder).rglob("*")) if path.suffix in (".cc", ".h")]
        paths = [path for path in paths if not (path.suffix == ".h" and DEVICE.search(path.read_text()))]
        units = [path for path in paths if path.suffix == ".cc"]
        if folder == "ffi/common":  # only other folders include most of its headers
            units += sorted((trees.ROOT / "ffi/cpu").glob("*.cc"))
        if files:
            paths = units = [trees.ROOT / file for file in files]
        self.sources = syntax.read(units, {str(path) for path in paths})
        self.mutants, self.edits = [], {}
        for index, (path, source) in enumerate(sorted(self.sources.items())):
            seen = {}
            for i, edit in enumerate(source.edits[:NUMBERS_PER_FILE]):
                number = first + index * NUMBERS_PER_FILE + i
                text = source.line_text(edit.begin)
                times = seen[text, edit.change] = seen.get((text, edit.change), 0) + 1
                change = edit.change + (f" #{times}" if times > 1 else "")
                self.mutants.append(Mutant(relative(path), source.line(edit.begin), edit.kind, text, change, number))
                self.edits[number] = (path, i)
        self.end = first + (len(self.sources) + 1) * NUMBERS_PER_FILE


class Build:
    """A copy of the repository in which the mutants of `parts` are switches: all, or those with these numbers.

    Without switches, folders and options are those of ordinary builds, so ccache has most objects.
    """

    def __init__(self, place, parts, numbers=None, jobs=2):
        self.place, self.tree, self.parts, self.jobs = place, place / "tree", parts, jobs
        self.builds = place if parts else self.tree / "build"
        self.mutants = [m for part in parts for m in part.mutants if numbers is None or m.place in numbers]
        self.end = max((part.end for part in parts), default=0)
        self.place.mkdir(parents=True, exist_ok=True)
        known = self.place / "dropped.json"  # mutants that did not compile in an earlier run
        remembered = {tuple(key) for key in json.loads(known.read_text())} if known.exists() else set()
        self.dropped = {mutant.place for mutant in self.mutants if mutant.key in remembered}
        self.write()

    def left(self):
        return [mutant for mutant in self.mutants if mutant.place not in self.dropped]

    def write(self):
        changed = {}
        numbers = {mutant.place for mutant in self.left()}
        for part in self.parts:
            for path, source in part.sources.items():
                chosen = {i: n for n, (file, i) in part.edits.items() if file == path and n in numbers}
                changed[relative(path)] = source.render(chosen).encode()
        # Switches prevent vectorisation of loops, so -O3 takes minutes and gains nothing.
        if self.parts:
            changed["CMakeLists.txt"] = (trees.ROOT / "CMakeLists.txt").read_bytes().replace(b'"-O3', b'"-O1')
        trees.copy(self.tree, changed)

    def drop(self, output):
        """Drops the mutants on lines with compiler errors. Returns their number."""
        before = len(self.dropped)
        for pattern in (r"^(\S+?):(\d+)(?::\d+)?: (?:fatal )?error: ", r"(\S+?\.(?:cc|h)):(\d+)"):
            found = set()
            for match in re.finditer(pattern, output, re.MULTILINE):
                path = os.path.normpath(os.path.join(self.builds / "native", match.group(1)))
                if path.startswith(str(self.tree)):
                    found.add((os.path.relpath(path, self.tree), int(match.group(2))))
            numbers = {mutant.place for mutant in self.left()}
            for part in self.parts:
                for number, (path, i) in part.edits.items():
                    source = part.sources[path]
                    lines = source.inserting_lines(source.edits[i]) if number in numbers else ()
                    if any((relative(path), line) in found for line in lines):
                        self.dropped.add(number)
            if len(self.dropped) > before:
                break
        kept = [mutant.key for mutant in self.mutants if mutant.place in self.dropped]
        (self.place / "dropped.json").write_text(json.dumps(kept))
        return len(self.dropped) - before

    def cmake(self, name, *options):
        flags = f"-O1 -g0 -DNDEBUG -w -include {self.tree / 'tests/mutation/switches.h'}"
        command = [trees.BIN / "cmake", "-S", self.tree, "-B", self.builds / name, "-G", "Ninja"]
        command += [f"-DCMAKE_MAKE_PROGRAM={trees.BIN / 'ninja'}", "-DJAXCOMM_CUDA=OFF"]
        command += [f"-DPython_EXECUTABLE={trees.BIN / 'python'}"]
        if self.parts:
            command += ["-DCMAKE_BUILD_TYPE=Mutants", f"-DCMAKE_CXX_FLAGS={flags}"]
        command.append(f"-DJAXCOMM_CUDA_WHEELS={trees.ROOT / 'build/cuda/wheels'}")
        done = subprocess.run([*map(str, command), *options], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)

    def ninja(self, name, targets, *options):
        """Builds the targets. Returns success and the output."""
        clone = self.place if self.parts else self.tree
        environment = {**os.environ, "CCACHE_BASEDIR": str(clone), "CCACHE_NOHASHDIR": "1"}
        command = [trees.BIN / "ninja", "-C", self.builds / name, "-j", self.jobs, *options, *targets]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        (self.place / f"{name}.log").write_text(done.stdout)
        return done.returncode == 0, done.stdout

    def compile(self, name, targets):
        """Builds the targets. Drops mutants that do not compile."""
        for _ in range(12):
            built, said = self.ninja(name, targets, "-k", "0")
            if built:
                return
            dropped = self.drop(said)
            print(f"{self.place.name}: {dropped} mutants do not compile", flush=True)
            if not dropped:
                break
            self.write()
        raise SystemExit(f"{self.place.name}: see {self.place / name}.log")

    def module(self):
        """Configures the module _core. Returns what to build: its libraries are those of the native tests."""
        self.cmake("native", "-DJAXCOMM_NATIVE_TESTS=ON")
        self.cmake("module", f"-DJAXCOMM_LIBRARIES={self.builds / 'native'}")
        return ("native", ["jaxcomm_native"]), ("module", ["_core"])

    def native(self, targets, folders=None):
        """Builds the targets. Returns the units of the programs in `folders` of tests/; None: of all programs built."""
        self.cmake("native", "-DJAXCOMM_NATIVE_TESTS=ON")
        self.compile("native", targets)
        units = []
        for test in self.programs():
            here = folders is None or pathlib.Path(test["command"][0]).parent.name in folders
            if here and "full" not in test["labels"]:
                units += self.cases(test)
        return units

    def programs(self, name="native"):
        """The tests of CTest whose programs are built."""
        command = [trees.BIN / "ctest", "--test-dir", self.builds / name, "--show-only=json-v1"]
        listed = subprocess.run(list(map(str, command)), capture_output=True, text=True).stdout
        return [test for test in trees.parse_tests(listed) if pathlib.Path(test["command"][0]).exists()]

    def cases(self, test):
        """One unit per case if the program lists its cases, else one unit."""
        program, environment, folder = test["command"][0], test["environment"], str(self.place)
        name = f"tests/{pathlib.Path(program).parent.name}/{test['name']}"
        try:
            done = subprocess.run([program, "--list"], capture_output=True, cwd=folder, timeout=30)
            cases = [case for case in done.stdout.splitlines() if case]
        except subprocess.TimeoutExpired:  # it ignores options and runs everything
            cases = []
        contents = pathlib.Path(program).read_bytes()
        if not cases or not all(case in contents for case in cases):
            return [Unit(name, tuple(test["command"]), folder, environment)]
        return [Unit(f"{name}: {case.decode()}", (program, case.decode()), folder, environment) for case in cases]
