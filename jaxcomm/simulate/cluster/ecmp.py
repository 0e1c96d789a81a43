"""Collisions of transfers that a hash assigns to one of several equal links (ECMP)."""

import functools

import numpy as np

_TRIALS = 400


@functools.cache
def load(flows: int, paths: int) -> float:
    """The expected number of transfers on the busiest link, divided by the mean of all links.

    `flows` transfers are under way at once. Each takes one of `paths` links with equal probability. For many transfers
    the busiest link has about F/S + sqrt(2 F/S ln S) of them (Raab, Steger, RANDOM 1998, doi 10.1007/3-540-49543-6_13).
    The mean of 400 seeded draws.
    """
    draws = np.random.default_rng(0).multinomial(flows, np.full(paths, 1 / paths), size=_TRIALS)
    return float(draws.max(axis=1).mean() * paths / flows)
