"""goodput(): the share of time that makes progress, with failures and checkpoints.

Failures of ranks are independent and exponentially distributed, also during checkpoints and restarts. A failure loses
the work since the last checkpoint. Source: Daly, Future Generation Computer Systems 22(3), 2006.
"""

import dataclasses
import math

import scipy.special


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The share of time that makes progress. ``str()`` gives a summary.

    Attributes:
      share: time of progress divided by all time.
      interval_s: work between two checkpoints.
      young_s, daly_s: approximations of the best interval, sqrt(2 C M) and its correction of higher order.
      mtbf_s: mean time between failures of all ranks together (M).
      checkpoint_share: time in checkpoints divided by all time. Failures cost the rest of the loss: lost work,
        detection and restarts.
    """

    share: float
    interval_s: float
    young_s: float
    daly_s: float
    mtbf_s: float
    checkpoint_share: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"goodput     {self.share:.2%} of the time, with a checkpoint every {self.interval_s:.4g} s of work",
                f"checkpoints {self.checkpoint_share:.2%} of the time",
                f"failures    {1 - self.share - self.checkpoint_share:.2%} of the time; one every {self.mtbf_s:.4g} s",
                f"intervals   {self.young_s:.4g} s by Young, {self.daly_s:.4g} s by Daly",
                "All numbers follow from the arguments; none is measured.",
            ]
        )


def _check(name: str, value: float, least: float, strict: bool) -> None:
    if not math.isfinite(value) or value < least or (strict and value == least):
        raise ValueError(f"goodput: {name} must be {'more than' if strict else 'at least'} {least:g}, got {value:g}")


def _time(work_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Mean time of a piece of work and its checkpoint. Daly, equation 15."""
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + checkpoint_s) / mtbf_s)
    except OverflowError:
        return math.inf


def _best(checkpoint_s: float, mtbf_s: float) -> float:
    """The interval of the highest goodput: the root of exp(x) (x - 1) = -exp(-C / M), with x = interval / M."""
    if checkpoint_s < 1e-6 * mtbf_s:  # where the digits of the function's argument cancel: its series
        p = math.sqrt(-2 * math.expm1(-checkpoint_s / mtbf_s))
        return mtbf_s * p * (1 - p / 3)
    return mtbf_s * (1 + float(scipy.special.lambertw(-math.exp(-checkpoint_s / mtbf_s - 1)).real))


def goodput(
    ranks: int,
    *,
    mtbf_s: float,
    checkpoint_s: float,
    restart_s: float,
    detect_s: float = 0.0,
    interval_s: float | None = None,
) -> Goodput:
    """Predicts the share of time that makes progress.

    Args:
      ranks: devices; a failure of any one stops all.
      mtbf_s: mean time between failures of one rank, with its share of hosts and network.
      checkpoint_s: time of a checkpoint, in which no progress is made.
      restart_s: from the detection of a failure to the first step.
      detect_s: from a failure to its detection.
      interval_s: work between checkpoints; None means the best interval.

    Raises:
      ValueError: a number out of range.
    """
    if ranks < 1:
        raise ValueError(f"goodput: ranks must be at least 1, got {ranks}")
    _check("mtbf_s", mtbf_s, 0, True)
    _check("checkpoint_s", checkpoint_s, 0, True)
    _check("restart_s", restart_s, 0, False)
    _check("detect_s", detect_s, 0, False)
    if interval_s is not None:
        _check("interval_s", interval_s, 0, True)
    mean_s = mtbf_s / ranks
    young_s = math.sqrt(2 * checkpoint_s * mean_s)
    daly_s = mean_s
    if checkpoint_s < 2 * mean_s:
        ratio = math.sqrt(checkpoint_s / (2 * mean_s))
        daly_s = young_s * (1 + ratio / 3 + ratio * ratio / 9) - checkpoint_s
    work_s = _best(checkpoint_s, mean_s) if interval_s is None else interval_s
    time_s = _time(work_s, checkpoint_s, restart_s + detect_s, mean_s)
    return Goodput(work_s / time_s, work_s, young_s, daly_s, mean_s, checkpoint_s / time_s)
