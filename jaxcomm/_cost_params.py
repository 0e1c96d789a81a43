"""The parameters of the cost model: constants, or those that calibrate() has saved for this machine."""

import functools
import json
import os
import pathlib
import platform
import warnings
from typing import Any

from jaxcomm import _core
from jaxcomm._config import cache_folder, config, write
from jaxcomm._processes import kv_store

_FORMAT = 2
measured: set[str] = set()  # scopes whose parameters are measured


def path() -> pathlib.Path | None:
    """File with the saved parameters; None if there is none to use."""
    given = config().calibration
    if given is not None:
        return pathlib.Path(given) if given else None
    folder = cache_folder()
    return folder / f"calibration-{platform.node() or 'localhost'}.json" if folder else None


def _machine(values: dict[str, Any]) -> Any:
    return _core.plan.Machine([tuple(row) for row in values["links"]], values["launch_s"], shared_network=True)


def apply(cost_params: dict[str, Any]) -> None:
    """Uses these parameters for all programs that this process compiles from now on."""
    for scope, values in cost_params.items():
        _core.set_cost_params(scope, _machine(values))
        measured.add(scope)


def save(cost_params: dict[str, Any]) -> None:
    """Writes parameters to path(). Parameters of other scopes in the file remain.

    Args:
      cost_params: scope -> {"links": rows of plan.Machine.links, "launch_s": seconds}.
    """
    if (file := path()) is None:
        return
    before = json.loads(_saved() or "{}").get("cost_params", {})
    kept = {"format": _FORMAT, "processors": len(os.sched_getaffinity(0)), "cost_params": before | cost_params}
    write(file, json.dumps(kept, indent=1))


def _saved() -> str:
    """Text of the file; "" if there is no valid file for this machine."""
    if (file := path()) is None:
        return ""
    try:
        kept = file.read_text()
        content = json.loads(kept)
        for values in content["cost_params"].values():
            _machine(values)
        fits = content["format"] == _FORMAT and content["processors"] == len(os.sched_getaffinity(0))
        return kept if fits else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"jaxcomm: {file} can't be used, so predictions start from constants: {error}", stacklevel=2)
        return ""


@functools.cache
def load() -> None:
    """Uses the parameters saved for this machine, if any. All processes use those of the first process to call this."""
    kept = kv_store.kv_agree("cost_params", _saved() or "none")
    if kept != "none":
        apply(json.loads(kept)["cost_params"])
