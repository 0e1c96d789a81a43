"""The type of hand-made mutants, which the modules hand_*.py list."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A text that occurs exactly once in a file of the repository, and its replacement."""

    name: str
    file: str
    old: str
    new: str
    tests: str
