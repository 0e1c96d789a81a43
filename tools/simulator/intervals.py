"""Prediction intervals from the errors of hold-outs.

Points of a measured series use errors in units of the residual's deviation, so that the interval is narrow between
close neighbours. All others use plain errors, by range of sizes.
"""

import numpy as np

from jaxcomm.simulate.nccl.intervals import SIZES, Intervals, size_range
from tools.simulator.holdouts import HeldOut
from tools.simulator.residual import NUGGET

# Evidence whose quantiles are in units of the residual's deviation.
SCALED = ("between", "beyond")
# 90 % quantile of the normal distribution.
_NORMAL = 1.2816
_LEVELS = (0.1, 0.9)
# Rows of one machine or harness err together, and these hold-outs have few of them: wider quantiles.
_WIDE_LEVELS = (0.03, 0.97)
_WIDE = ("larger", "harness", "system")
# A range of sizes with fewer errors uses those of all sizes.
_FEWEST = 25
# Evidence of a prediction, and the hold-out whose errors it has.
SOURCES = {"scale": "scale", "larger": "larger", "op": "operation", "harness": "harness", "device": "system"}


def limits(
    intervals: Intervals, evidence: np.ndarray, size: np.ndarray, deviation: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the intervals as offsets to the logarithm of the time: lower, upper."""
    low, high = np.zeros(len(evidence)), np.zeros(len(evidence))
    for i, name in enumerate(evidence):
        if name == "measured":
            low[i], high[i] = -_NORMAL * NUGGET, _NORMAL * NUGGET
            continue
        scale = deviation[i] if name in SCALED and name in intervals.quantiles else 1.0
        low[i], high[i] = (end * scale for end in intervals.of(name, size[i]))
    return np.minimum(low, 0), np.maximum(high, 0)


def _pairs(error: np.ndarray, size: np.ndarray, hold_out: str = "") -> list[tuple[float, float]]:
    place, result = size_range(size), []
    for number in range(len(SIZES)):
        chosen = error[place == number]
        chosen = chosen if len(chosen) >= _FEWEST else error
        low, high = np.quantile(chosen, _WIDE_LEVELS if hold_out in _WIDE else _LEVELS)
        result.append((float(low), float(high)))
    return result


def calibrate(scaled: tuple[np.ndarray, ...], held_out: dict[str, HeldOut], sizes: np.ndarray) -> Intervals:
    """Intervals from leave-one-out errors (error, deviation, size, evidence) and from hold-outs.

    Args:
      scaled: what `holdouts.leave_one_out` returns.
      held_out: by name of the hold-out; evidence whose hold-out is missing has the widest interval, a guess.
      sizes: of the rows of the held_out table.
    """
    error, deviation, size, evidence = scaled
    quantiles = {}
    for name in SCALED:
        mask = evidence == name
        if mask.any():
            quantiles[name] = _pairs(error[mask] / deviation[mask], size[mask])
    for name, source in SOURCES.items():
        if source in held_out and len(held_out[source]):
            quantiles[name] = _pairs(held_out[source].error, sizes[held_out[source].index], source)
    return Intervals(quantiles)


def coverage(held_out: HeldOut, sizes: np.ndarray) -> float:
    """Share of the test rows inside intervals that were made without them.

    The intervals of `points` come from its training rows, those of another hold-out from its other parts. Without
    any, the share is NaN.
    """
    inside = []
    if held_out.name == "points":
        if not len(held_out):
            return float("nan")
        intervals = calibrate(held_out.calibration, {}, sizes)
        low, high = limits(intervals, held_out.evidence, sizes[held_out.index], held_out.deviation)
        return float(np.mean((held_out.error >= low) & (held_out.error <= high)))
    for number in sorted(set(held_out.part)):
        mine, others = held_out.part == number, held_out.part != number
        if not others.any():
            return float("nan")
        pairs = np.array(_pairs(held_out.error[others], sizes[held_out.index[others]], held_out.name))
        place = size_range(sizes[held_out.index[mine]])
        inside.append((held_out.error[mine] >= pairs[place, 0]) & (held_out.error[mine] <= pairs[place, 1]))
    return float(np.mean(np.concatenate(inside))) if inside else float("nan")
