"""Prediction intervals that hold 80 % of the times: quantiles of errors on rows that a fit has not seen."""

import dataclasses

import numpy as np

SIZES = ("under 64 KiB", "to 1 MiB", "to 64 MiB", "above")
_EDGES = (2.0**16, 2.0**20, 2.0**26)
# Factor of four, a guess, where no measurement exists.
_GUESS = (-float(np.log(4)), float(np.log(4)))


def size_range(size: np.ndarray) -> np.ndarray:
    """The position of each size in SIZES."""
    return np.searchsorted(_EDGES, size, side="right")


@dataclasses.dataclass(frozen=True)
class Intervals:
    """`quantiles[evidence]` has one pair for each entry of SIZES."""

    quantiles: dict[str, list[tuple[float, float]]]

    def of(self, evidence: str, size: float) -> tuple[float, float]:
        """The ends of the interval as offsets to the logarithm of the time: lower, upper."""
        pairs = self.quantiles.get(evidence)
        return pairs[int(size_range(np.array(size)))] if pairs else _GUESS
