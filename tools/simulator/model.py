"""Both layers together: plan model times residual."""

import dataclasses
from typing import Any

import numpy as np

from jaxcomm.simulate.nccl import hardware
from jaxcomm.simulate.nccl.features import Features
from tools.simulator import forms, rows, systems
from tools.simulator.residual import Knots, Residual
from tools.simulator.table import Table


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One entry per row.

    Attributes:
      log_time: logarithm of microseconds; NaN where declined.
      evidence: the measurements that the prediction rests on, best first: "measured" (this very point), "between" or
        "beyond" (the measured sizes of its series), "scale" (another number of ranks, pattern or option), "larger"
        (more ranks than any measurement of the system), "op", "harness" (another one, or another library version, on
        this device), "device" (shares of other devices' data sheets), "guess".
      deviation: of the residual; NaN without one.
      reasons: of the declined rows.
    """

    log_time: np.ndarray
    evidence: np.ndarray
    deviation: np.ndarray
    reasons: dict[int, str]


@dataclasses.dataclass(frozen=True)
class Model:
    systems: systems.Systems
    residual: Residual

    def plan(self, table: Table, q: Features) -> tuple[np.ndarray, list[str], list[str]]:
        """Logarithm of the plan model's time, form and origin of the parameters of each row."""
        names, keys = forms.describe(table, q)
        log_time, origins = np.full(len(table), np.nan), [""] * len(table)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, key in enumerate(keys):
            if np.isfinite(q.link[i]):
                groups.setdefault((key, str(q.kind[i])), []).append(i)
        for (key, device), index in groups.items():
            values, origin = self.systems.lookup(key, device)
            log_time[index] = np.log(forms.FORMS[key[0]](q.take(np.array(index)), values))
            for i in index:
                origins[i] = origin
        return log_time, names, origins

    def predict(self, table: Table, use_residual: bool = True) -> Prediction:
        q = rows.features(table)
        log_time, names, origins = self.plan(table, q)
        knots = Knots.of(table.rows, names)
        evidence = _evidence(self.residual, knots, origins)
        deviation = np.full(len(table), np.nan)
        if use_residual and len(table):
            shift, deviation = self.residual.predict(knots)
            log_time = log_time + np.where(np.array(origins) == "system", shift, 0)
            exact = self.residual.exact(knots)
            plan = log_time - shift
            log_time = np.where(np.isfinite(exact), plan + exact, log_time)
        reasons = {}
        for i, row in enumerate(table.rows):
            if hardware.device(row.hardware) is None:
                known = ", ".join(d.name for d in hardware.devices())
                reasons[i] = f"unknown hardware {row.hardware!r}; known: {known}"
            elif row.ranks == 1:
                reasons[i] = "a group of one rank exchanges nothing"
        log_time[list(reasons)] = np.nan
        return Prediction(log_time, evidence, deviation, reasons)


def _evidence(residual: Residual, knots: Knots, origins: list[str]) -> np.ndarray:
    known: dict[tuple[Any, ...], tuple[float, float]] = {}
    points: set[tuple[Any, ...]] = set()
    largest: dict[tuple[Any, ...], float] = {}
    ops: set[tuple[Any, ...]] = set()
    for key, size in zip(residual.knots.series(), residual.knots.size, strict=True):
        low, high = known.get(key, (np.inf, 0.0))
        known[key] = (min(low, size), max(high, size))
        points.add((key, size))
        machine = (key[0], key[1], key[5])
        largest[machine] = max(largest.get(machine, 0), key[-1])
        ops.add((machine, key[3]))
    result = []
    for key, size, origin in zip(knots.series(), knots.size, origins, strict=True):
        machine = (key[0], key[1], key[5])
        if origin != "system":
            result.append(systems.EVIDENCE.get(origin, "guess"))
        elif (key, size) in points:
            result.append("measured")
        elif key in known:
            low, high = known[key]
            result.append("between" if low < size < high else "beyond")
        elif (machine, key[3]) not in ops:
            result.append("op")
        else:
            result.append("larger" if key[-1] > 1.5 * largest[machine] else "scale")
    return np.array(result, dtype=object)
