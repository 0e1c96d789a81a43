"""Mistakes written by hand: lists of Mutant in the modules hand_*.py."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A text that occurs exactly once in a file of the repository, and its replacement."""

    name: str
    file: str
    old: str
    new: str
    tests: str
