"""Which GPUs and versions have passed ``python -m jaxcomm.selftest``: a file in the user's cache folder.

Programs for GPUs use XLA's own collectives by default until the self-test has passed with their GPUs and versions.
jaxcomm.moe.dispatch and combine use XLA's collectives between nodes until the self-test has passed between nodes, with
NCCL's GPU-initiated networking (GIN).
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import re
from collections.abc import Collection
from typing import Any

import jax

from jaxcomm import _native
from jaxcomm._config import cache_folder, write
from jaxcomm._core import plan
from jaxcomm._processes import kv_store

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
        "gin": os.environ.get("NCCL_GIN_ENABLE", ""),
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


_PASSED, _BETWEEN_NODES = "passed", "between_nodes"  # lists of keys in the file
_ONE_EXCHANGE, _MEASURED = "one_exchange", "measured"  # the same; a list of {"key": ..., "rows": [...]}


def _keys(name: str = _PASSED) -> list[Any]:
    try:
        read = json.loads(file.read_text()) if (file := path()) else {}
    except (OSError, ValueError):
        return []
    keys = read.get(name, []) if isinstance(read, dict) and read.get("format") == _FORMAT else []
    return keys if isinstance(keys, list) else []


def save(passed: dict[str, str], between_nodes: bool = False) -> pathlib.Path | None:
    """Adds a key to the file. Returns the file; None if the user has no cache folder.

    Args:
      passed: of a self-test that has passed.
      between_nodes: whether dispatch and combine between nodes were among its tests. Otherwise, an earlier success no
        longer counts.

    Raises:
      OSError: the file can't be written.
    """
    return _write(passed, (_PASSED, _BETWEEN_NODES) if between_nodes else (_PASSED,))


def revoke(failed: dict[str, str], only_between_nodes: bool) -> None:
    """Takes a key out of the file.

    Args:
      failed: of a self-test that has failed.
      only_between_nodes: only dispatch and combine between nodes have failed. A success inside them still counts.

    Raises:
      OSError: the file can't be written.
    """
    if any(failed in _keys(name) for name in (_PASSED, _BETWEEN_NODES)):
        _write(failed, (_PASSED,) if only_between_nodes and failed in _keys() else ())


def _write(key: dict[str, str], lists: Collection[str]) -> pathlib.Path | None:
    """Leaves the key in these lists only."""
    if (file := path()) is None:
        return None
    keys = {name: [known for known in _keys(name) if known != key] for name in (_PASSED, _BETWEEN_NODES)}
    for name in lists:
        keys[name].append(key)
    write(file, json.dumps({"format": _FORMAT, **keys}, indent=1))
    return file


@functools.cache
def passed() -> bool:
    """Whether the self-test has passed on this combination. The same answer in all processes of the program."""
    return _agreed(_PASSED)


@functools.cache
def passed_between_nodes() -> bool:
    """Whether it has passed with dispatch and combine between nodes: GIN works there. The same in all processes."""
    return _agreed(_BETWEEN_NODES)


@functools.cache
def measured() -> list[plan.Measured]:
    """The calls for which a self-test has measured a plan as faster here. The same in all processes of the program."""
    return [plan.Measured(**row) for row in json.loads(kv_store.kv_agree("selftest/measured", json.dumps(_rows())))]


@functools.cache
def measured_one_exchange() -> bool:
    """Whether it has measured the kernel of route_and_dispatch as faster. The same in all processes."""
    return _agreed(_ONE_EXCHANGE)


def _rows() -> list[dict[str, str | int]]:
    """Rows of this combination: the fields of plan.Measured by name."""
    own = key()
    return [] if own is None else [row for found in _keys(_MEASURED) if found["key"] == own for row in found["rows"]]


def _agreed(name: str) -> bool:
    own = key()
    found = own is not None and own in _keys(name)
    return kv_store.kv_agree(f"selftest/{name}", str(int(found))) == "1"
