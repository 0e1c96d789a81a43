"""Environment variables, read once."""

import dataclasses
import functools
import math
import os


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of this process.

    Attributes:
      timeout_s: seconds that a rank waits for the others before its call ends in an error (JAXCOMM_TIMEOUT_S).
    """

    timeout_s: float = 30.0


def _positive_float(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number of seconds, got {text!r}")
    return value


@functools.cache
def config() -> Config:
    """The settings, from the environment at the first call."""
    return Config(timeout_s=_positive_float("JAXCOMM_TIMEOUT_S", Config.timeout_s))
