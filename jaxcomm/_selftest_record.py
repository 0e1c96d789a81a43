"""Which GPUs and versions have passed ``python -m jaxcomm.selftest``: a file in the user's cache folder.

Until the self-test has passed on this combination, programs for GPUs use XLA's own collectives by default.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import re

import jax

from jaxcomm import _kv_store, _native
from jaxcomm._config import cache_folder

_FORMAT = 2  # 1: without started transfers
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def key() -> dict[str, str] | None:
    """The GPUs and versions of this program, equal in all its processes; None without GPUs or without the CUDA module.

    A self-test inside one host does not count for programs on several hosts.
    """
    try:
        gpus = jax.devices("cuda")
        module = _native.cuda()
        nccl = module.nccl(_native.nccl_wheel())["version"]
    except (ImportError, RuntimeError):
        return None
    hosts = {getattr(gpu, "slice_index", None) if jax.process_count() > 1 else 0 for gpu in gpus}
    return {
        "gpus": ", ".join(sorted({gpu.device_kind for gpu in gpus})),
        "hosts": "one" if len(hosts) == 1 and None not in hosts else "several",
        "driver": _driver() or str(module.driver_version()),
        "nccl": str(nccl),
        "built": " ".join(f"{name}={value}" for name, value in sorted(module.built().items())),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jaxcomm": importlib.metadata.version("jaxcomm"),
    }


def _driver() -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def path() -> pathlib.Path | None:
    folder = cache_folder()
    return folder / "selftest.json" if folder else None


def _keys() -> list[dict[str, str]]:
    try:
        read = json.loads(file.read_text()) if (file := path()) else {}
    except (OSError, ValueError):
        return []
    passed = read.get("passed", []) if isinstance(read, dict) and read.get("format") == _FORMAT else []
    return passed if isinstance(passed, list) else []


def save(passed: dict[str, str]) -> pathlib.Path | None:
    """Adds a key to the file. Returns the file; None if the user has no cache folder.

    Raises:
      OSError: the file can't be written.
    """
    if (file := path()) is None:
        return None
    keys = [known for known in _keys() if known != passed] + [passed]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps({"format": _FORMAT, "passed": keys}, indent=1))
    new.replace(file)  # atomic: readers see the old or the new file
    return file


@functools.cache
def passed() -> bool:
    """Whether the self-test has passed on this combination. The same answer in all processes of the program."""
    own = key()
    found = own is not None and own in _keys()
    return _kv_store.kv_agree("selftest/passed", str(int(found))) == "1"
