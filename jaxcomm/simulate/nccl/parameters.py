"""Reads fitted parameters from JSON. The package ships one file."""

import dataclasses
import functools
import importlib.resources
import json
import math
import pathlib
from typing import Any

from jaxcomm.simulate.cluster.toml_table import unknown
from jaxcomm.simulate.nccl import formulas, model, systems
from jaxcomm.simulate.nccl.intervals import Intervals
from jaxcomm.simulate.nccl.residual import ENTRY, Residual

FORMAT = 1
_KEYS = ("format", "origin", "units", "bands", "priors", "systems", "residual")
_SYSTEM = ("key", "device", "rows", "parameters", "identified")


class ParametersError(ValueError):
    """A file of parameters that cannot be read; the message names file and key."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The model and the intervals of its predictions."""

    model: model.Model
    intervals: Intervals
    origin: str


def load(path: str | pathlib.Path) -> Fitted:
    """Reads a file that `python -m tools.simulator fit` wrote."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise ParametersError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ParametersError(f"{path}: not JSON: {error}") from None
    return _parse(str(path), data)


@functools.cache
def shipped() -> Fitted:
    """The parameters of the package."""
    file = importlib.resources.files("jaxcomm.simulate.nccl") / "data" / "parameters.json"
    return _parse("data/parameters.json", json.loads(file.read_text(encoding="utf-8")))


def _parse(path: str, data: Any) -> Fitted:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ParametersError(f"{path}: key format: expected {FORMAT}; write the file anew with `fit`")
    try:
        _check_keys(path, data)
        priors = {
            form: {n: systems.Prior(*map(_positive, pair)) for n, pair in prior.items()}
            for form, prior in data["priors"].items()
        }
        if set(priors) != set(formulas.FORMS):
            raise ParametersError(f"{path}: key priors: expected {', '.join(formulas.FORMS)}")
        fitted = {}
        for entry in data["systems"]:
            key = tuple(entry["key"])
            if set(entry["parameters"]) != set(priors[key[0]]):
                raise ParametersError(f"{path}: key systems: parameters of {', '.join(key)} do not match its form")
            values = {n: _positive(v) for n, v in entry["parameters"].items()}
            fitted[key] = systems.System(values, entry["identified"], entry["device"], entry["rows"])
        residual = Residual.from_data(data["residual"])
        intervals = Intervals({k: [(low, high) for low, high in v] for k, v in data["bands"].items()})
        return Fitted(model.Model(systems.Systems(fitted, priors), residual), intervals, data["origin"])
    except ParametersError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ParametersError(f"{path}: missing or malformed key: {error}") from None


def _check_keys(path: str, data: dict[str, Any]) -> None:
    tables: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [("", data, _KEYS)]
    tables += [(f"systems[{i}].", entry, _SYSTEM) for i, entry in enumerate(data.get("systems", []))]
    tables += [(f"residual[{i}].", entry, ENTRY) for i, entry in enumerate(data.get("residual", []))]
    for place, table, known in tables:
        for key in table:
            if key not in known:
                raise ParametersError(f"{path}: {place}{key}: {unknown(key, known)}")


def _positive(value: Any) -> float:
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"got parameter {value!r}, expected a positive number")
    return number
