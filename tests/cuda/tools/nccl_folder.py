"""Finds a machine's NCCL and checks whether jaxcomm can use it."""

import contextlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
OLDEST_NCCL = 22907  # kOldestNccl of ffi/cuda/nccl/nccl_library.h; of headers: cmake/Cuda.cmake
NCCL_VERSION = """import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)"""


def output(*command: str, environment: dict[str, str] | None = None, text: str = "", limit_s: float = 60) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, input=text, timeout=limit_s, cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()[-300:]}"


def version_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Nccl:
    """NCCL in a folder that has include/ and lib/; versions are 0 where there is none.

    Attributes:
      given: the user has brought it along, instead of JAX's own.
    """

    def __init__(self, folder: pathlib.Path | None, given: bool):
        self.folder, self.given, self.headers, self.library = folder, given, 0, 0
        if folder is None:
            return
        with contextlib.suppress(OSError):
            found = re.search(r"define NCCL_VERSION_CODE +(\d+)", (folder / "include" / "nccl.h").read_text())
            self.headers = int(found[1]) if found else 0
        said = output(sys.executable, "-c", NCCL_VERSION, str(self.path))
        self.library = int(said) if said.isdigit() else 0

    @property
    def path(self) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / "lib" / "libnccl.so.2"

    @property
    def problem(self) -> str:
        """The reason why jaxcomm._cuda cannot be built with it and run; empty if it can."""
        bring = "Bring NCCL 2.30.7 or later along: NCCL=folder (docs/development/gpu-tests.md)"
        if self.headers < OLDEST_NCCL:
            found = f"headers of NCCL {version_text(self.headers)}" if self.headers else "no headers of NCCL"
            return f"{found} in {self.folder}, 2.29.7 or later are needed to build jaxcomm._cuda. {bring}"
        if self.library < OLDEST_NCCL:
            found = f"libnccl.so.2 is {version_text(self.library)}" if self.library else "there is no libnccl.so.2"
            return f"{found} in {self.folder}, 2.29.7 or later is needed to run jaxcomm._cuda. {bring}"
        return ""

    def __str__(self) -> str:
        return f"{version_text(self.library)}, headers {version_text(self.headers)}, {self.folder}"


def jax_nccl() -> Nccl:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (folder := pathlib.Path(place, "nccl")).exists():
            return Nccl(folder, given=False)
    return Nccl(None, given=False)


def find_nccl(given: str, own: Nccl) -> Nccl:
    """NCCL in the folder (of `pip install --target`, or with include/ and lib/), else JAX's own."""
    if not given:
        return own
    root = pathlib.Path(given).resolve()
    for folder in (root / "nvidia" / "nccl", root / "nccl", root):
        if (folder / "include" / "nccl.h").exists():
            return Nccl(folder, given=True)
    raise SystemExit(f"NCCL={given}: there is no include/nccl.h, nor nvidia/nccl/include/nccl.h")
