"""Robust least squares in logarithms with a prior on every parameter."""

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.optimize

# Errors of this size (log) count in full; larger ones grow linearly only (soft L1).
SCALE = 0.1
# Of a derivative. SciPy's own steps are relative to theta, and vanish where a parameter is close to one.
_STEP = 1e-4


@dataclasses.dataclass(frozen=True)
class Fit:
    theta: np.ndarray
    loss: float
    variance: np.ndarray  # of each parameter's logarithm, from the curvature; near the prior's variance without data


def minimize(
    model: Callable[[np.ndarray], np.ndarray],
    target: np.ndarray,
    mean: np.ndarray,
    spread: np.ndarray,
    start: np.ndarray,
    weight: np.ndarray | None = None,
) -> Fit:
    """The least soft L1 loss of log times plus ((theta - mean) / spread)^2.

    Args:
      model: logarithms of the parameters -> logarithms of the times.
      target: logarithms of the measured times.
      mean, spread: the prior of theta.
      start: where to begin.
      weight: of each time; None means 1.
    """
    weight = np.ones(len(target)) if weight is None else weight

    def errors(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([(model(theta) - target) / SCALE, (theta - mean) / spread])

    def loss(squares: np.ndarray) -> np.ndarray:
        """The loss of each square and its two derivatives: soft L1 of times, the square itself of the prior."""
        rows = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        times = 1 + squares[: len(target)]
        rows[:, : len(target)] = weight * np.stack([2 * (times**0.5 - 1), times**-0.5, -0.5 * times**-1.5])
        return rows

    def jacobian(theta: np.ndarray) -> np.ndarray:
        base = errors(theta)
        return np.stack([(errors(theta + step) - base) / _STEP for step in _STEP * np.eye(len(theta))], axis=1)

    found = scipy.optimize.least_squares(errors, start, jac=jacobian, loss=loss, ftol=1e-4, max_nfev=60)
    return Fit(found.x, 2 * float(found.cost), np.diag(np.linalg.inv(found.jac.T @ found.jac)))
