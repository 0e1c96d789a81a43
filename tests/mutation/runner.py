"""Runs the tests against mutants, in a copy of the repository with its own builds below build/mutants."""

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import time
from typing import NamedTuple

from .mutants import ROOT

PLACE = ROOT / "build/mutants"
BIN = pathlib.Path(sys.executable).parent
LIMIT_S = 900  # of tests without a mutant
MOST_BYTES = 8 << 30  # of data and of a file: a mutant may write without end
SURVIVED, CAUGHT, TIMED_OUT = "survived", "caught", "timed out"
# Makes Python import jaxcomm from the copy: the finder of the editable install would precede every path.
SITE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""


class Run(NamedTuple):
    """Tests that ended, or that were killed at their limit."""

    passed: bool
    seconds: float
    timed_out: bool = False


def by_pytest(mutant):
    """Else by native programs."""
    return ".py" in mutant.tests or mutant.file.endswith(".py")


def put(path, content):
    """Writes only files that differ, so that builds stay incremental."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def limit():
    """Of the calling process and its children."""
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Runner:
    def __init__(self, place=PLACE, jobs=2):
        self.tree, self.log, self.jobs = place / "tree", place / "test.log", jobs
        self.usual, self.configured = {}, set()

    def copy(self):
        """Makes the tree a copy of the repository, untracked files included."""
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        names = {name for name in listed if (ROOT / name).is_file()}
        for name in names:
            put(self.tree / name, (ROOT / name).read_bytes())
            (self.tree / name).chmod((ROOT / name).stat().st_mode)
        for path in self.tree.rglob("*"):
            name = str(path.relative_to(self.tree))
            if path.suffix in (".cc", ".h", ".py", ".txt") and name not in names and "build/" not in name:
                path.unlink()
        wheels = self.tree / "build/cuda/wheels"
        if not wheels.exists():
            wheels.parent.mkdir(parents=True, exist_ok=True)
            wheels.symlink_to(ROOT / "build/cuda/wheels")
        put(self.tree / "build/site/sitecustomize.py", SITE.encode())

    def build(self, name, targets):
        """Builds targets of "native", of the native tests with the sanitizer of this name, or of "module"."""
        build = self.tree / "build" / name
        if name not in self.configured:
            own = {
                "module": f"-DJAXCOMM_LIBRARIES={build.with_name('native')}", "native": "-DJAXCOMM_NATIVE_TESTS=ON",
            }.get(name, f"-DJAXCOMM_NATIVE_TESTS=ON;-DJAXCOMM_SANITIZE={name}")  # fmt: skip
            command = [
                BIN / "cmake",
                "-S",
                self.tree,
                "-B",
                build,
                "-G",
                "Ninja",
                "-DJAXCOMM_CUDA=OFF",
                *own.split(";"),
            ]
            command += [f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}", f"-DPython_EXECUTABLE={BIN / 'python'}"]
            command += [f"-DJAXCOMM_CUDA_WHEELS={ROOT / 'build/cuda/wheels'}"]
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            self.configured.add(name)
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.tree), "CCACHE_NOHASHDIR": "1"}
        command = [BIN / "ninja", "-C", build, "-j", str(self.jobs), *targets]
        with self.log.open("wb") as log:
            return subprocess.run(list(map(str, command)), stdout=log, env=environment).returncode == 0

    def programs(self, folder):
        """The names of the native tests of a folder, without those of the full size."""
        command = [BIN / "ctest", "--test-dir", self.tree / "build/native", "--show-only=json-v1"]
        listed = subprocess.run(list(map(str, command)), capture_output=True, text=True).stdout
        found = []
        for test in json.loads(listed)["tests"]:
            labels = next((p["value"] for p in test["properties"] if p["name"] == "LABELS"), [])
            if f"/tests/{folder}/" in test.get("command", [""])[0] and "full" not in labels:
                found.append(test["name"])
        return found

    def commands(self, mutant):
        """Builds what the tests need: [(command, limited, environment)], or None if that fails."""
        words = mutant.tests.split()
        if by_pytest(mutant):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
            paths = (self.tree / "build/site", self.tree, self.tree / "tests")
            environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
            return [(command, True, environment)]
        found = {}
        for word in words:
            sanitizer, _, name = word.rpartition(":")
            found.setdefault(sanitizer or "native", []).append(name)
        commands = []
        for build, names in found.items():
            targets = [f"{name}/all" if name.startswith("tests/") else name for name in names]
            if not self.build(build, targets):
                return None
            names = [n for name in names for n in (self.programs(name[6:]) if name.startswith("tests/") else [name])]
            command = [BIN / "ctest", "--test-dir", self.tree / "build" / build, "--stop-on-failure", f"-j{self.jobs}"]
            commands.append(([*command, "-R", f"^({'|'.join(names)})$"], build == "native", {}))
        return commands

    def passes(self, mutant, limit_s=LIMIT_S):
        """Runs the tests of a mutant in this tree. Returns a Run, or None if the tree does not compile."""
        if by_pytest(mutant):
            built = pathlib.Path(sysconfig.get_path("platlib"), "jaxcomm")
            if mutant.file.startswith("ffi/"):
                if not (self.build("native", ["jaxcomm_native"]) and self.build("module", ["_core"])):
                    return None
                built = self.tree / "build/module"
            for path in [*built.glob("_core*.so"), *built.glob("_cuda*.so")]:
                put(self.tree / "jaxcomm" / path.name, path.read_bytes())
        commands = self.commands(mutant)
        if commands is None:
            return None
        began, run = time.monotonic(), Run(True, 0)
        for command, limited, environment in commands:
            if run.passed:
                run = self.run(command, limited, environment, limit_s)
        return run._replace(seconds=time.monotonic() - began)

    def run(self, command, limited, environment, limit_s):
        """Runs a command, and kills it and its children after `limit_s`. A sanitizer needs more than limit()."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                list(map(str, command)), cwd=self.tree, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limit if limited else None,
            )  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Run(False, limit_s, True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        skipped = "pytest" in command and not re.search(rb"\b[1-9]\d* passed\b", self.log.read_bytes())
        return Run(status == 0 and not skipped, 0)

    def judge(self, mutant):
        """Returns the result of a mutant, or None with a message if there is none."""
        if mutant.tests not in self.usual:
            self.usual[mutant.tests] = self.passes(mutant)
            if not (self.usual[mutant.tests] and self.usual[mutant.tests].passed):
                print(f"without a mutant, {mutant.tests} fails or is not built: {self.log}", flush=True)
        usual = self.usual[mutant.tests]
        if usual is None or not usual.passed:
            return None
        file, limit_s = self.tree / mutant.file, 3 * usual.seconds + 10
        original = file.read_bytes()
        file.write_text(mutant.mutated())
        try:
            run = self.passes(mutant, limit_s)
        finally:
            file.write_bytes(original)
        if run is None:
            print(f"{mutant.place}: does not compile: {mutant.name}", flush=True)
            return None
        if run.timed_out:  # by the mutant, or by other work on this machine
            again = self.passes(mutant)
            if not again.passed or again.seconds > limit_s / 2:
                print(f"{mutant.place}: no result, the machine is slow", flush=True)
                return None
        return SURVIVED if run.passed else TIMED_OUT if run.timed_out else CAUGHT
