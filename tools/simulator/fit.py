"""Fits the parameters of every system, each with the other systems as its prior, and the residual."""

from collections import defaultdict

import numpy as np

from jaxcomm._measure import least_squares
from jaxcomm.simulate.nccl import hardware
from jaxcomm.simulate.nccl.features import Features
from tools.simulator import forms, measured, rows
from tools.simulator.model import Model
from tools.simulator.priors import PRIORS
from tools.simulator.residual import Knots, Residual
from tools.simulator.systems import Key, Prior, System, Systems
from tools.simulator.table import Table

# Weight of rows that are slower than a larger size of their series.
_WARM_UP_WEIGHT = 0.2
_STARTS = 2


def _fit_one(
    key: Key,
    q: Features,
    target: np.ndarray,
    weight: np.ndarray,
    prior: dict[str, Prior],
    start: np.ndarray | None = None,
) -> least_squares.Fit:
    mean = np.log([p.center for p in prior.values()])
    spread = np.array([p.spread for p in prior.values()])
    names = list(prior)

    def model(theta: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(forms.FORMS[key[0]](q, dict(zip(names, np.exp(theta), strict=True)))))

    random = np.random.default_rng(0)
    starts = [start] if start is not None else [mean + k * spread * random.normal(size=len(mean)) for k in (0, 0.5)]
    fits = [least_squares.minimize(model, target, mean, spread, s, weight) for s in starts[:_STARTS]]
    return min(fits, key=lambda fit: fit.loss)


# First fits by system and rows: the parts of a hold-out share most of them.
Cache = dict[tuple[Key, tuple[int, ...]], least_squares.Fit]


def fit_systems(table: Table, q: Features, cache: Cache | None = None, wanted: set[Key] | None = None) -> Systems:
    """Fits every system twice: with the neutral prior, then with a prior from the other systems.

    Args:
      table, q: rows with a time.
      cache: shared by calls on parts of one table.
      wanted: the systems that are fitted twice; None means all. Others serve as prior only.
    """
    cache = {} if cache is None else cache
    _, keys = forms.describe(table, q)
    index = defaultdict(list)
    for i, key in enumerate(keys):
        if np.isfinite(q.link[i]):
            index[key].append(i)
    log_time = np.log(measured.times(table))
    weight = np.array([_WARM_UP_WEIGHT if measured.is_warm_up(row) else 1.0 for row in table.rows])
    devices = {key: _device(table, rows[0]) for key, rows in index.items()}
    parts = {k: (q.take(np.array(v)), log_time[v], weight[v]) for k, v in sorted(index.items())}
    thetas, first = {}, {}
    for key, part in parts.items():
        neutral = PRIORS[key[0]]
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
    return Systems(fitted, {form: _prior(form, fitted) for form in PRIORS})


def _device(table: Table, i: int) -> str:
    found = hardware.device(table.rows[i].hardware)
    assert found is not None
    return found.name


def _system(prior: dict[str, Prior], found: least_squares.Fit, device: str, rows: int) -> System:
    values = {name: float(v) for name, v in zip(prior, np.exp(found.theta), strict=True)}
    spread = np.array([p.spread for p in prior.values()])
    known = {n: float(np.clip(1 - v, 0, 1)) for n, v in zip(prior, found.variance / spread**2, strict=True)}
    return System(values, known, device, rows)


def _prior(form: str, others: dict[Key, System]) -> dict[str, Prior]:
    """Mean and spread of the systems' logarithms; each device counts once, the neutral prior half."""
    result = {}
    for name, neutral in PRIORS[form].items():
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
        result[name] = Prior(float(np.exp(mean)), float(np.sqrt(variance)))
    return result


def fit(table: Table, cache: Cache | None = None, wanted: set[Key] | None = None) -> Model:
    """Fits both layers to the rows of known hardware; `fit_systems` explains the options."""
    q = rows.features(table)
    table = measured.select(table, np.isfinite(q.link) & (q.ranks > 1))
    q = rows.features(table)
    found = fit_systems(table, q, cache, wanted)
    bare = Model(found, Residual(Knots.of((), []), np.zeros(0)))
    log_time, names, _ = bare.plan(table, q)
    return Model(found, Residual(Knots.of(table.rows, names), np.log(measured.times(table)) - log_time))
