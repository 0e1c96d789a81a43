"""Bands that hold 80 % of the times: quantiles of the errors of the split that a prediction belongs to.

Points of a measured series use errors in units of the residual layer's deviation, so that the band is narrow between
close neighbours. All others use plain errors, by size band.
"""

import dataclasses

import numpy as np

from jaxcomm.simulate.judge import Judged
from jaxcomm.simulate.residual import NUGGET

SIZES = ("under 64 KiB", "to 1 MiB", "to 64 MiB", "above")
_EDGES = (2.0**16, 2.0**20, 2.0**26)
_LEVELS = (0.1, 0.9)
# Rows of one machine or harness err together, and these splits have few of them: wider quantiles.
_WIDE_LEVELS = (0.03, 0.97)
_WIDE_SPLITS = ("X", "H", "S0")
# A size band with fewer errors uses those of all sizes.
_FEWEST = 25
# 90 % quantile of the normal distribution.
_NORMAL = 1.2816
# Factor of four, a guess, where no measurement exists.
_GUESS = (-float(np.log(4)), float(np.log(4)))
_SCALED = ("between", "beyond")
# Basis of a prediction and the split whose errors it has.
SOURCES = {"scale": "N", "larger": "X", "op": "O", "harness": "H", "device": "S0"}


def size_band(size: np.ndarray) -> np.ndarray:
    return np.searchsorted(_EDGES, size, side="right")


@dataclasses.dataclass(frozen=True)
class Bands:
    """`quantiles[basis]` has one pair for each entry of SIZES."""

    quantiles: dict[str, list[tuple[float, float]]]

    def limits(self, basis: np.ndarray, size: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the band as offsets to the logarithm of the time: lower, upper."""
        low, high = np.zeros(len(basis)), np.zeros(len(basis))
        for i, (name, band) in enumerate(zip(basis, size_band(size), strict=True)):
            if name == "measured":
                low[i], high[i] = -_NORMAL * NUGGET, _NORMAL * NUGGET
                continue
            pairs = self.quantiles.get(name)
            low[i], high[i] = pairs[band] if pairs else _GUESS
            if name in _SCALED and pairs:
                low[i], high[i] = low[i] * deviation[i], high[i] * deviation[i]
        return np.minimum(low, 0), np.maximum(high, 0)


def _pairs(error: np.ndarray, size: np.ndarray, split: str = "") -> list[tuple[float, float]]:
    band, result = size_band(size), []
    for number in range(len(SIZES)):
        chosen = error[band == number]
        chosen = chosen if len(chosen) >= _FEWEST else error
        low, high = np.quantile(chosen, _WIDE_LEVELS if split in _WIDE_SPLITS else _LEVELS)
        result.append((float(low), float(high)))
    return result


def calibrate(scaled: tuple[np.ndarray, ...], judged: dict[str, Judged], sizes: np.ndarray) -> Bands:
    """Bands from leave-one-out errors (error, deviation, size, basis) and from judged splits.

    Args:
      scaled: what `judge.leave_one_out` returns.
      judged: by name of the split; those that are missing leave their bases with the widest band, a guess.
      sizes: of the rows of the judged table.
    """
    error, deviation, size, basis = scaled
    quantiles = {}
    for name in _SCALED:
        mask = basis == name
        if mask.any():
            quantiles[name] = _pairs(error[mask] / deviation[mask], size[mask])
    for name, split in SOURCES.items():
        if split in judged and len(judged[split]):
            quantiles[name] = _pairs(judged[split].error, sizes[judged[split].index], split)
    return Bands(quantiles)


def coverage(judged: Judged, sizes: np.ndarray) -> float:
    """Share of the test rows inside bands that were made without them.

    Split I takes its bands from its own training rows; other splits from their other parts. NaN if there are none.
    """
    held = []
    if judged.split == "I":
        if not len(judged):
            return float("nan")
        bands = calibrate(judged.calibration, {}, sizes)
        low, high = bands.limits(judged.basis, sizes[judged.index], judged.deviation)
        return float(np.mean((judged.error >= low) & (judged.error <= high)))
    for number in sorted(set(judged.part)):
        mine, others = judged.part == number, judged.part != number
        if not others.any():
            return float("nan")
        pairs = np.array(_pairs(judged.error[others], sizes[judged.index[others]], judged.split))
        band = size_band(sizes[judged.index[mine]])
        held.append((judged.error[mine] >= pairs[band, 0]) & (judged.error[mine] <= pairs[band, 1]))
    return float(np.mean(np.concatenate(held))) if held else float("nan")
