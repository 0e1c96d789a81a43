"""Writes the parameters that `python -m jaxcomm.simulate predict` reads."""

import json
import pathlib
from collections import defaultdict
from typing import Any

import numpy as np

from jaxcomm.simulate.nccl.parameters import FORMAT, Fitted
from jaxcomm.simulate.nccl.residual import TEXTS, Residual
from jaxcomm.simulate.nccl.table import Table
from tools.simulator import fit, holdouts, intervals


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


def save(path: str | pathlib.Path, fitted: Fitted) -> None:
    found = fitted.model.systems
    data = {
        "format": FORMAT,
        "origin": fitted.origin,
        "units": "us; GB/s for channel_*; shares of data/hardware.toml for share_*, self, nic_*; log_ratio is natural",
        "bands": {
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
