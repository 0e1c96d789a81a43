"""Fitted parameters as JSON: the package ships one file, `fit` writes others."""

import dataclasses
import functools
import importlib.resources
import json
import math
import pathlib
from typing import Any

import numpy as np

from jaxcomm.simulate import judge, model, parameters, systems
from jaxcomm.simulate.bands import SOURCES, Bands, calibrate
from jaxcomm.simulate.figures import unknown
from jaxcomm.simulate.residual import ENTRY, Residual
from jaxcomm.simulate.table import Table

_FORMAT = 1
_KEYS = ("format", "origin", "units", "bands", "priors", "systems", "residual")
_SYSTEM = ("key", "device", "rows", "parameters", "identified")


class ParametersError(ValueError):
    """A file of parameters that cannot be read; the message names file and key."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Both layers and the bands of their predictions."""

    model: model.Model
    bands: Bands
    origin: str


def fit(table: Table, origin: str, with_splits: bool = True) -> Fitted:
    """Fits a table and calibrates the bands.

    Args:
      table: rows without a time are ignored.
      origin: where the measurements come from, for the reader of the file.
      with_splits: judge scales, ops, systems and harnesses too; without, predictions there have the widest band.
    """
    table = table.measured()
    fitted = model.fit(table)
    cache: systems.Cache = {}
    judged = {name: judge.judge(table, name, cache) for name in SOURCES.values()} if with_splits else {}
    sizes = np.array([row.size for row in table.rows])
    return Fitted(fitted, calibrate(judge.leave_one_out(fitted), judged, sizes), origin)


def save(path: str | pathlib.Path, fitted: Fitted) -> None:
    found = fitted.model.systems
    data = {
        "format": _FORMAT,
        "origin": fitted.origin,
        "units": "us; GB/s for channel_*; shares of data/hardware.toml for share_*, self, nic_*; log_ratio is natural",
        "bands": {k: [[round(x, 4) for x in pair] for pair in v] for k, v in sorted(fitted.bands.quantiles.items())},
        "priors": {
            form: {n: [_short(p.center), _short(p.spread)] for n, p in prior.items()}
            for form, prior in found.priors.items()
        },
        "systems": [
            {
                "key": list(key),
                "device": s.device,
                "rows": s.rows,
                "parameters": {n: _short(v) for n, v in s.parameters.items()},
                "identified": {n: round(v, 2) for n, v in s.identified.items()},
            }
            for key, s in sorted(found.fitted.items())
        ],
        "residual": fitted.model.residual.to_data(),
    }
    # One entry a line, so that a change of one series is a change of one line.
    lines = []
    for key, value in data.items():
        if isinstance(value, list):
            entries = ",\n  ".join(json.dumps(entry) for entry in value)
            lines.append(f'"{key}": [\n  {entries}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    pathlib.Path(path).write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def load(path: str | pathlib.Path) -> Fitted:
    """Reads what `save` wrote."""
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
    file = importlib.resources.files("jaxcomm.simulate") / "data" / "parameters.json"
    return _parse("data/parameters.json", json.loads(file.read_text(encoding="utf-8")))


def _parse(path: str, data: Any) -> Fitted:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ParametersError(f"{path}: key format: expected {_FORMAT}; write the file anew with `fit`")
    try:
        _check_keys(path, data)
        priors = {
            form: {n: parameters.Prior(*map(_positive, pair)) for n, pair in prior.items()}
            for form, prior in data["priors"].items()
        }
        fitted = {}
        for entry in data["systems"]:
            key = tuple(entry["key"])
            if set(entry["parameters"]) != set(parameters.PRIORS[key[0]]):
                raise ParametersError(f"{path}: key systems: parameters of {', '.join(key)} do not match its form")
            values = {n: _positive(v) for n, v in entry["parameters"].items()}
            fitted[key] = systems.System(values, entry["identified"], entry["device"], entry["rows"])
        if set(priors) != set(parameters.PRIORS):
            raise ParametersError(f"{path}: key priors: expected {', '.join(parameters.PRIORS)}")
        residual = Residual.from_data(data["residual"])
        bands = Bands({k: [(low, high) for low, high in v] for k, v in data["bands"].items()})
        return Fitted(model.Model(systems.Systems(fitted, priors), residual), bands, data["origin"])
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
