"""Prediction intervals that hold 80 % of the times: quantiles of errors on rows that a fit has not seen.

Points of a measured series use errors in units of the residual's deviation, so that the interval is narrow between
close neighbours. All others use plain errors, by range of sizes.
"""

import dataclasses

import numpy as np

from jaxcomm.simulate.nccl.residual import NUGGET

SIZES = ("under 64 KiB", "to 1 MiB", "to 64 MiB", "above")
_EDGES = (2.0**16, 2.0**20, 2.0**26)
# 90 % quantile of the normal distribution.
_NORMAL = 1.2816
# Factor of four, a guess, where no measurement exists.
_GUESS = (-float(np.log(4)), float(np.log(4)))
# Evidence whose quantiles are in units of the residual's deviation.
SCALED = ("between", "beyond")


def size_range(size: np.ndarray) -> np.ndarray:
    """The position of each size in SIZES."""
    return np.searchsorted(_EDGES, size, side="right")


@dataclasses.dataclass(frozen=True)
class Intervals:
    """`quantiles[evidence]` has one pair for each entry of SIZES."""

    quantiles: dict[str, list[tuple[float, float]]]

    def limits(self, evidence: np.ndarray, size: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the interval as offsets to the logarithm of the time: lower, upper."""
        low, high = np.zeros(len(evidence)), np.zeros(len(evidence))
        for i, (name, number) in enumerate(zip(evidence, size_range(size), strict=True)):
            if name == "measured":
                low[i], high[i] = -_NORMAL * NUGGET, _NORMAL * NUGGET
                continue
            pairs = self.quantiles.get(name)
            low[i], high[i] = pairs[number] if pairs else _GUESS
            if name in SCALED and pairs:
                low[i], high[i] = low[i] * deviation[i], high[i] * deviation[i]
        return np.minimum(low, 0), np.maximum(high, 0)
