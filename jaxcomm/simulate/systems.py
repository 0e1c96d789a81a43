"""Fits one set of parameters per system, each with the other systems as its prior."""

import dataclasses
from collections import defaultdict

import numpy as np

from jaxcomm.simulate import hardware, optimize, parameters, plans
from jaxcomm.simulate.query import Queries
from jaxcomm.simulate.table import Table

Key = tuple[str, ...]
# These rows are slower than a larger size of their series.
_WARM_UP_WEIGHT = 0.2
_STARTS = 2


@dataclasses.dataclass(frozen=True)
class System:
    """Parameters of one system. `identified`: share of the prior's variance that the data removed, 0 to 1."""

    parameters: dict[str, float]
    identified: dict[str, float]
    device: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Systems:
    fitted: dict[Key, System]
    priors: dict[str, dict[str, parameters.Prior]]  # of an unmeasured system, by form

    def lookup(self, key: Key, device: str) -> tuple[dict[str, float], str]:
        """Parameters for a row, and where they come from: `system`, `device`, `form` or `guess`."""
        if key in self.fitted:
            return self.fitted[key].parameters, "system"
        # Forms for single kernels take values from the same kernel only: key[3:5] is its op and library.
        related = {k: s for k, s in self.fitted.items() if k[0] == key[0] and k[3:5] == key[3:5]}
        prior = {name: p.center for name, p in self.priors[key[0]].items()}
        near = [s for s in related.values() if s.device == device]
        near = near or [s for s in related.values() if s.device in hardware.sisters(device)]
        if near:
            return {name: _blend(center, name, near) for name, center in prior.items()}, "device"
        if not related:
            return prior, "guess"
        # The launch belongs to the harness more than to the device.
        harness = [s for k, s in related.items() if k[1] == key[1]]
        if harness:
            prior["launch"] = _blend(prior["launch"], "launch", harness)
        return prior, "form"


def _blend(center: float, name: str, systems: list[System]) -> float:
    """Mean of logarithms: weights say how well each system identifies the parameter; the prior has a small one."""
    weights = np.array([s.identified[name] for s in systems] + [0.05])
    values = np.log([s.parameters[name] for s in systems] + [center])
    return float(np.exp(weights @ values / weights.sum()))


def describe(table: Table, q: Queries) -> tuple[list[str], list[Key]]:
    """Form and system of each row."""
    forms = [parameters.form(row, q, i) for i, row in enumerate(table.rows)]
    return forms, [parameters.system(row, form) for row, form in zip(table.rows, forms, strict=True)]


def _fit_one(
    key: Key,
    q: Queries,
    target: np.ndarray,
    weight: np.ndarray,
    prior: dict[str, parameters.Prior],
    start: np.ndarray | None = None,
) -> optimize.Fit:
    mean = np.log([p.center for p in prior.values()])
    spread = np.array([p.spread for p in prior.values()])
    names = list(prior)

    def model(theta: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(plans.FORMS[key[0]](q, dict(zip(names, np.exp(theta), strict=True)))))

    random = np.random.default_rng(0)
    starts = [start] if start is not None else [mean + k * spread * random.normal(size=len(mean)) for k in (0, 0.5)]
    fits = [optimize.minimize(model, target, mean, spread, s, weight) for s in starts[:_STARTS]]
    return min(fits, key=lambda fit: fit.loss)


# First fits by system and rows: the parts of a split share most of them.
Cache = dict[tuple[Key, tuple[int, ...]], optimize.Fit]


def fit(table: Table, q: Queries, cache: Cache | None = None, wanted: set[Key] | None = None) -> Systems:
    """Fits every system twice: with the neutral prior, then with a prior from the other systems.

    Args:
      table, q: rows with a time.
      cache: shared by calls on parts of one table.
      wanted: the systems that are fitted twice; None means all. Others serve as prior only.
    """
    cache = {} if cache is None else cache
    _, keys = describe(table, q)
    index = defaultdict(list)
    for i, key in enumerate(keys):
        if np.isfinite(q.link[i]):
            index[key].append(i)
    log_time = np.log(table.times())
    weight = np.array([_WARM_UP_WEIGHT if row.warm_up else 1.0 for row in table.rows])
    devices = {key: _device(table, rows[0]) for key, rows in index.items()}
    parts = {k: (q.take(np.array(v)), log_time[v], weight[v]) for k, v in sorted(index.items())}
    thetas, first = {}, {}
    for key, part in parts.items():
        neutral = parameters.PRIORS[key[0]]
        name = (key, tuple(table.rows[i].line for i in index[key]))
        found = cache[name] if name in cache else cache.setdefault(name, _fit_one(key, *part, neutral))
        thetas[key] = found.theta
        first[key] = _system(neutral, found, devices[key], len(part[1]))
    fitted = dict(first)
    for key, part in parts.items():
        if wanted is not None and key not in wanted:
            continue
        prior = _prior(key[0], {k: s for k, s in first.items() if s.device != devices[key]})
        found = _fit_one(key, *part, prior, thetas[key])
        fitted[key] = _system(prior, found, devices[key], len(part[1]))
    return Systems(fitted, {form: _prior(form, fitted) for form in parameters.PRIORS})


def _device(table: Table, i: int) -> str:
    found = hardware.device(table.rows[i].hardware)
    assert found is not None
    return found.name


def _system(prior: dict[str, parameters.Prior], found: optimize.Fit, device: str, rows: int) -> System:
    values = {name: float(v) for name, v in zip(prior, np.exp(found.theta), strict=True)}
    spread = np.array([p.spread for p in prior.values()])
    known = {n: float(np.clip(1 - v, 0, 1)) for n, v in zip(prior, found.variance / spread**2, strict=True)}
    return System(values, known, device, rows)


def _prior(form: str, others: dict[Key, System]) -> dict[str, parameters.Prior]:
    """Mean and spread of the systems' logarithms; each device counts once, the neutral prior half."""
    result = {}
    for name, neutral in parameters.PRIORS[form].items():
        votes = defaultdict(list)
        for key, system in others.items():
            if key[0] == form and system.identified[name] > 0.5:
                votes[system.device].append(np.log(system.parameters[name]))
        means = np.array([np.mean(v) for v in votes.values()])
        values = np.append(means, np.log(neutral.center))
        weights = np.append(np.ones(len(means)), 0.5)
        mean = float(weights @ values / weights.sum())
        # The neutral spread counts as one device's observation.
        variance = (neutral.spread**2 + ((means - mean) ** 2).sum()) / (1 + len(means))
        result[name] = parameters.Prior(float(np.exp(mean)), float(np.sqrt(variance)))
    return result
