"""Arrival skew: when the ranks of a group begin a collective."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from jaxcomm.simulate.cluster.toml_table import TIMES, seconds

_POINTS = 20_000
_EULER = 0.5772156649015329


@dataclasses.dataclass(frozen=True)
class Skew:
    """Arrivals after the nominal start of a collective.

    Attributes:
      kind: "normal" (standard deviation `scale_s`), "exponential" (mean), "lognormal" (median, and the standard
        deviation of the logarithm in `shape`), or "list".
      scale_s, shape: parameters of the distribution.
      arrivals_s: of a list, by rank.
    """

    kind: str
    scale_s: float = 0.0
    shape: float = 0.0
    arrivals_s: tuple[float, ...] = ()

    def last_s(self, ranks: int) -> float:
        """The expected arrival of the last of `ranks` independent ranks."""
        if self.kind == "list":
            return max(self.arrivals_s)
        if self.kind == "exponential":  # harmonic numbers
            few = sum(1 / k for k in range(1, min(ranks, 1000) + 1))
            n = float(ranks)
            return self.scale_s * (few if ranks <= 1000 else math.log(n) + _EULER + 1 / (2 * n))
        # The mean of the quantiles of the maximum, whose distribution is the n-th power.
        normal = statistics.NormalDist()
        quantiles = ((i + 0.5) / _POINTS for i in range(_POINTS))
        deviates = np.array([normal.inv_cdf(u ** (1 / ranks)) for u in quantiles])
        if self.kind == "normal":
            return float(self.scale_s * deviates.mean())
        return float(self.scale_s * np.exp(self.shape * deviates).mean())

    def sample_s(self, ranks: int, seed: int) -> np.ndarray:
        """Arrivals of all ranks."""
        if self.kind == "list":
            return np.array(self.arrivals_s)
        random = np.random.default_rng(seed)
        if self.kind == "exponential":
            return random.exponential(self.scale_s, ranks)
        if self.kind == "normal":
            return random.normal(0, self.scale_s, ranks)
        return random.lognormal(math.log(self.scale_s), self.shape, ranks)


def parse(text: str) -> Skew:
    """The skew of "normal:5us", "exponential:5us", "lognormal:5us:0.8" or "0us,0us,30us"."""
    kind, colon, rest = text.partition(":")
    if not colon:
        return given([seconds("--skew", part, TIMES) for part in text.split(",")])
    parts = rest.split(":")
    if kind not in ("normal", "exponential", "lognormal") or len(parts) != 1 + (kind == "lognormal"):
        raise ValueError(
            f"--skew: got {text!r}, expected normal:TIME, exponential:TIME, lognormal:TIME:SIGMA or a list of times"
        )
    try:
        shape = float(parts[1]) if len(parts) > 1 else 0.0
    except ValueError:
        raise ValueError(f"--skew: got {parts[1]!r}, expected the standard deviation of a logarithm") from None
    scale_s = seconds("--skew", parts[0], TIMES)
    if scale_s <= 0 or shape < 0:
        raise ValueError(f"--skew: got {text!r}, expected positive values")
    return Skew(kind, scale_s, shape)


def given(arrivals_s: Sequence[float]) -> Skew:
    """The skew of a list of arrivals by rank."""
    arrivals = tuple(float(arrival_s) for arrival_s in arrivals_s)
    if not arrivals or any(not math.isfinite(arrival_s) or arrival_s < 0 for arrival_s in arrivals):
        raise ValueError(f"skew: expected arrivals of at least 0 s by rank, got {arrivals_s!r}")
    return Skew("list", arrivals_s=arrivals)
