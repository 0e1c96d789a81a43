"""Copies of the repository below build/mutants, and tests run in them with limits."""

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

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/mutants"
MEMORY_BYTES = 8 << 30  # of data per process: a mutant may allocate without end
# The simulated GPUs of tests/cuda/fakes/machine.h share a sparse file with 1 GiB per rank.
FILE_BYTES = 8 << 30
LOG_BYTES = 1 << 20  # of the end of a log, which a mutant may fill
BIN = pathlib.Path(sys.executable).parent


def files():
    """The files of the repository, untracked ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def put(path, content):
    """Writes only files that differ, so that builds stay incremental."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def copy(tree, changed=None):
    """Makes `tree` a copy of the repository, with the files {path: bytes} of `changed`."""
    changed = changed or {}
    names = set(files())
    for name in names:
        put(tree / name, changed.get(name, (ROOT / name).read_bytes()))
        mode = (ROOT / name).stat().st_mode
        if (tree / name).stat().st_mode != mode:
            (tree / name).chmod(mode)
    for path in tree.rglob("*"):
        name = str(path.relative_to(tree))
        if (
            path.is_file()
            and name not in names
            and path.suffix in (".cc", ".h", ".py", ".txt")
            and "build/" not in name
        ):
            path.unlink()
    # The wheels that `make cuda` downloads, where the tests look for them.
    wheels = ROOT / "build/cuda/wheels"
    if wheels.exists() and not (tree / "build/cuda/wheels").exists():
        (tree / "build/cuda").mkdir(parents=True, exist_ok=True)
        (tree / "build/cuda/wheels").symlink_to(wheels)


def limit():
    """Limits the memory, file sizes and core files of the calling process and its children."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Run(NamedTuple):
    """Tests that ended, or that were killed at their limit."""

    passed: bool
    seconds: float
    timed_out: bool = False


def is_mutant_slow(again, limit_s):
    """Whether a mutant caused a timeout, and not other work on this machine.

    `again`: the same tests without the mutant, right after the timeout.
    """
    return again.passed and again.seconds < limit_s / 2


def run(command, cwd, limit_s, environment=None, log=None, setup=limit):
    """Runs a command. Kills it and its children after `limit_s`. Returns a Run.

    `setup` runs in the process first. A program with a sanitizer reserves more memory than limit() leaves it.
    """
    began = time.monotonic()
    output = open(log or os.devnull, "wb")  # noqa: SIM115 (closed below)
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=setup,
    )
    try:
        passed, timed_out = process.wait(limit_s) == 0, False
    except subprocess.TimeoutExpired:
        passed, timed_out = False, True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.close()
    return Run(passed, time.monotonic() - began, timed_out)


# Makes Python import jaxcomm from the copy: the finder of the editable install would precede every path.
SITE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
import os
if "MUTANT_LINES" in os.environ:
    from mutation import lines
    lines.start()
"""


def python_environment(tree):
    """The environment in which Python imports jaxcomm, models and tests from `tree`."""
    put(tree / "build/site/sitecustomize.py", SITE.encode())
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (tree / "build/site", tree, tree / "tests"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


PYTEST = ["-x", "-q", "-p", "no:cacheprovider"]


def pytest(arguments):
    return [sys.executable, "-m", "pytest", *PYTEST, *arguments]


def run_pytest(tree, arguments, limit_s, log, environment=None):
    """Runs pytest in a copy of the repository, which has native modules. Returns a Run."""
    own = {**python_environment(tree), "JAX_PLATFORMS": "cpu", **(environment or {})}
    return run(pytest(arguments), tree, limit_s, own, log)


def end(log):
    """The last part of a log."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


def failed(log):
    """The failed test in the log of pytest, or ""."""
    found = re.search(r"^FAILED (\S+)", end(log), re.MULTILINE) if log else None
    return found.group(1) if found else ""


def has_run(log):
    """Whether a test passed, by the log of pytest, which also succeeds if it skips every test."""
    return re.search(r"\b[1-9]\d* passed\b", end(log)) is not None


def parse_tests(listing):
    """Reads `ctest --show-only=json-v1`: name, command, environment and labels of the tests that are built."""
    found = []
    for test in json.loads(listing)["tests"]:
        if "command" in test:
            properties = {entry["name"]: entry["value"] for entry in test["properties"]}
            environment = dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", []))
            labels = properties.get("LABELS", [])
            command = test["command"]
            found.append({"name": test["name"], "command": command, "environment": environment, "labels": labels})
    return found


def installed():
    """The built modules _core and, if this environment has it, _cuda."""
    place = pathlib.Path(sysconfig.get_path("platlib")) / "jaxcomm"
    return [path for name in ("_core", "_cuda") for path in place.glob(f"{name}*.so")]
