"""Writes files of fitted parameters, and reads them with checks."""

import dataclasses
import functools
import json
import math
import pathlib
from collections import defaultdict
from typing import Any

import numpy as np

from jaxcomm.simulate.cluster.toml_table import unknown
from jaxcomm.simulate.nccl import formulas, hardware
from jaxcomm.simulate.nccl.intervals import Intervals
from tools.simulator import fit, forms, holdouts, intervals
from tools.simulator.model import Model
from tools.simulator.residual import ENTRY, TEXTS, Residual
from tools.simulator.systems import EVIDENCE, Prior, System, Systems
from tools.simulator.table import Table

FORMAT = 2
_KEYS = ("format", "origin", "units", "intervals", "priors", "systems", "residual")
_SYSTEM = ("key", "device", "rows", "parameters", "identified")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The model and the intervals of its predictions."""

    model: Model
    intervals: Intervals
    origin: str


class ParametersError(ValueError):
    """A file of parameters that cannot be read; the message names file and key."""


def fitted_to(table: Table, origin: str, with_hold_outs: bool = True) -> Fitted:
    """Fits a table and calibrates the intervals.

    Args:
      table: rows with a time.
      origin: where the measurements come from, for the reader of the file.
      with_hold_outs: predict hold-outs too; without, predictions of other scales, ops and systems get the widest
        interval.
    """
    fitted = fit.fit(table)
    cache: fit.Cache = {}
    held_out = (
        {name: holdouts.predict(table, name, cache) for name in intervals.SOURCES.values()} if with_hold_outs else {}
    )
    sizes = np.array([row.size for row in table.rows])
    return Fitted(fitted, intervals.calibrate(holdouts.leave_one_out(fitted), held_out, sizes), origin)


def plain(fitted: Fitted) -> dict[str, Any]:
    """The content of a file."""
    found = fitted.model.systems
    return {
        "format": FORMAT,
        "origin": fitted.origin,
        "units": "us; GB/s for channel_*; shares of data/hardware.toml for share_*, self, nic_*; log_ratio is natural",
        "intervals": {
            k: [[round(x, 4) for x in pair] for pair in v] for k, v in sorted(fitted.intervals.quantiles.items())
        },
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
        "residual": _series(fitted.model.residual),
    }


def of_package(data: dict[str, Any]) -> dict[str, Any]:
    """What `jaxcomm.simulate` reads: it predicts NCCL on devices behind switches, and no row of a table."""
    kept = {key: data[key] for key in ("origin", "units")}
    kept["intervals"] = {
        name: data["intervals"][name] for name in sorted(EVIDENCE.values()) if name in data["intervals"]
    }
    found, kept["parameters"] = _systems(data), {}
    for form in formulas.FORMS:
        of_form = kept["parameters"][form] = {}
        for device in (device.name for device in hardware.devices() if device.kind == "switch"):
            values, origin = found.lookup((form, "", ""), device)
            of_form[device] = [EVIDENCE[origin], {name: float(f"{value:.8g}") for name, value in values.items()}]
    return kept


def _systems(data: dict[str, Any]) -> Systems:
    """The systems in the content of a file."""
    priors = {form: {name: Prior(*pair) for name, pair in prior.items()} for form, prior in data["priors"].items()}
    fitted = {
        tuple(entry["key"]): System(entry["parameters"], entry["identified"], entry["device"], entry["rows"])
        for entry in data["systems"]
    }
    return Systems(fitted, priors)


def save(path: str | pathlib.Path, data: dict[str, Any]) -> None:
    """Writes what ``plain`` or ``of_package`` returns."""
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


def _series(residual: Residual) -> list[dict[str, Any]]:
    """The points of each series, as plain data."""
    knots = residual.knots
    found = defaultdict(list)
    for i, key in enumerate(knots.series()):
        found[key].append(i)
    entries = []
    for key in sorted(found):
        index = sorted(found[key], key=lambda i: knots.size[i])
        entry: dict[str, Any] = dict(zip(TEXTS, key, strict=False))
        entry["ranks"] = int(key[-1])
        entry["size"] = [int(knots.size[i]) for i in index]
        entry["log_ratio"] = [round(float(residual.values[i]), 5) for i in index]
        if any(knots.noise[i] for i in index):
            entry["noise"] = [round(float(knots.noise[i]), 3) for i in index]
        entries.append(entry)
    return entries


@functools.cache
def of_measurements() -> Fitted:
    """The parameters that the package's are a part of."""
    return load(pathlib.Path(__file__).parent / "parameters.json")


def load(path: str | pathlib.Path) -> Fitted:
    """Reads a file that ``save`` wrote."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ParametersError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ParametersError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ParametersError(f"{path}: key format: expected {FORMAT}; write the file anew with `fit`")
    try:
        _check(str(path), data)
        model = Model(_systems(data), Residual.from_data(data["residual"]))
        return Fitted(model, Intervals(data["intervals"]), data["origin"])
    except ParametersError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ParametersError(f"{path}: missing or malformed key: {error}") from None


def _check(path: str, data: dict[str, Any]) -> None:
    """Refuses unknown keys, forms with other parameters than those of the model, and values that are not positive."""
    tables: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [("", data, _KEYS)]
    tables += [(f"systems[{i}].", entry, _SYSTEM) for i, entry in enumerate(data.get("systems", []))]
    tables += [(f"residual[{i}].", entry, ENTRY) for i, entry in enumerate(data.get("residual", []))]
    for place, table, known in tables:
        for key in table:
            if key not in known:
                raise ParametersError(f"{path}: {place}{key}: {unknown(key, known)}")
    values = [value for prior in data["priors"].values() for pair in prior.values() for value in pair]
    values += [value for entry in data["systems"] for value in entry["parameters"].values()]
    for value in values:
        if not (value > 0 and math.isfinite(value)):
            raise ParametersError(f"{path}: got parameter {value!r}, expected a positive number")
    if set(data["priors"]) != set(forms.FORMS):
        raise ParametersError(f"{path}: key priors: expected {', '.join(forms.FORMS)}")
    for entry in data["systems"]:
        if set(entry["parameters"]) != set(data["priors"][entry["key"][0]]):
            raise ParametersError(f"{path}: key systems: parameters of {', '.join(entry['key'])} do not match its form")
