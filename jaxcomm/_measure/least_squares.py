"""Robust least squares in logarithms with a prior on every parameter, in NumPy."""

import dataclasses
from collections.abc import Callable

import numpy as np

# Errors of this size (log) count in full; larger ones grow linearly only (soft L1).
SCALE = 0.1


@dataclasses.dataclass(frozen=True)
class Fit:
    theta: np.ndarray
    loss: float
    variance: np.ndarray  # of each parameter's logarithm, from the curvature; near the prior's variance without data


def _loss(
    residual: np.ndarray, theta: np.ndarray, mean: np.ndarray, precision: np.ndarray, weight: np.ndarray
) -> float:
    soft = 2 * (np.sqrt(1 + (residual / SCALE) ** 2) - 1)
    return float(weight @ soft + precision @ (theta - mean) ** 2)


def minimize(
    model: Callable[[np.ndarray], np.ndarray],
    target: np.ndarray,
    mean: np.ndarray,
    spread: np.ndarray,
    start: np.ndarray,
    weight: np.ndarray | None = None,
    rounds: int = 40,
) -> Fit:
    """Levenberg-Marquardt on the soft L1 loss of log times plus ((theta - mean) / spread)^2.

    Args:
      model: logarithms of the parameters -> logarithms of the times.
      target: logarithms of the measured times.
      mean, spread: the prior of theta.
      start: where to begin.
      weight: of each time; None means 1.
    """
    weight = np.ones(len(target)) if weight is None else weight
    precision = 1 / spread**2
    theta, damping, step = start.copy(), 1e-2, 1e-4
    value = model(theta)
    loss = _loss(value - target, theta, mean, precision, weight)
    hessian = np.diag(precision)
    for _ in range(rounds):
        residual = value - target
        jacobian = np.stack([(model(theta + step * unit) - value) / step for unit in np.eye(len(theta))], axis=1)
        w = weight / (SCALE**2 * np.sqrt(1 + (residual / SCALE) ** 2))
        hessian = jacobian.T @ (jacobian * w[:, None]) + np.diag(precision)
        gradient = jacobian.T @ (w * residual) + precision * (theta - mean)
        improved = False
        for _ in range(6):
            move = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
            trial = theta + np.clip(move, -1, 1)
            trial_value = model(trial)
            trial_loss = _loss(trial_value - target, trial, mean, precision, weight)
            if trial_loss < loss:
                improved = True
                break
            damping *= 5
        if not improved:
            break
        gain = loss - trial_loss
        theta, value, loss = trial, trial_value, trial_loss
        damping = max(damping / 10, 1e-9)
        if gain < 1e-4 * loss:
            break
    return Fit(theta, loss, np.diag(np.linalg.inv(hessian)))
