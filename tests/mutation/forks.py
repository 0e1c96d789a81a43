"""Runs pytest in forks of one process that has imported JAX. The import takes longer than most tests."""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import warnings

from . import lines, trees

MODULES = ("numpy", "pytest", "jax.numpy", "jax.experimental.compilation_cache.compilation_cache", "jax.export")


class Pytest:
    """The process that forks. Its working directory is `tree`. It serves one run at a time."""

    def __init__(self, tree, modules=()):
        environment = {**os.environ, **trees.python_environment(tree), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "mutation.forks", *MODULES, *modules]
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments, limit_s, log, environment=None):
        """Returns a trees.Run."""
        request = {"arguments": arguments, "limit_s": limit_s, "log": str(log), "environment": environment or {}}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return trees.Run(*json.loads(self._process.stdout.readline()))

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def _child(request):
    """Runs pytest once. Does not return."""
    code = 70
    try:
        os.setsid()
        trees.limit()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        os.environ.update(request["environment"])
        if lines.VARIABLE in os.environ:
            lines.start()
        import pytest

        warnings.resetwarnings()
        code = int(pytest.main(trees.PYTEST + request["arguments"]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _serve(request):
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(request)
    handle = os.pidfd_open(pid)
    ended = select.select([handle], [], [], request["limit_s"])[0]
    os.close(handle)
    try:
        os.killpg(pid, signal.SIGKILL)  # with all processes that it has started
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it has no process group of its own yet
    _, status = os.waitpid(pid, 0)
    passed = bool(ended) and os.waitstatus_to_exitcode(status) == 0
    return trees.Run(passed, round(time.monotonic() - began, 2), not ended)


def main():
    warnings.simplefilter("ignore")  # JAX warns of every fork; this process starts no back end
    for name in sys.argv[1:]:
        __import__(name)
    sys.path.insert(0, str(pathlib.Path.cwd()))
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
