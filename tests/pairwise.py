"""Tables of options in which any two values of two options meet, with few cases."""

import itertools
import random

DRAWN = 3000


def cases(options, allowed, seed=0):
    """Cases, {option: value}. Every pair of values of two options that an allowed case has is in one of them.

    Args:
      options: {option: values}.
      allowed: case -> whether the functions under test take it.
      seed: other seeds give other cases.
    """
    rng = random.Random(seed)
    drawn = ({option: rng.choice(values) for option, values in options.items()} for _ in range(DRAWN))
    numbers: dict = {}  # of the pairs

    def pairs(case):
        """The pairs of a case, as the bits of a number."""
        found = itertools.combinations([(option, str(value)) for option, value in case.items()], 2)
        return sum(1 << numbers.setdefault(pair, len(numbers)) for pair in found)

    pool = [(pairs(case), case) for case in drawn if allowed(case)]
    chosen, met = [], 0
    while met != (1 << len(numbers)) - 1:
        new, case = max(pool, key=lambda each: (each[0] & ~met).bit_count())
        chosen.append(case)
        met |= new
    return chosen
