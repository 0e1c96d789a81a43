"""The processes of this machine that measure together: they start each repetition together and share what they saw."""

import mmap
import os
import pathlib
import pickle
import time
from typing import Any

# Longer than anything that a process does between two barriers, even gloo's slowest repetitions.
_DEADLINE_S = 300
_WORDS = 8  # per process, a cache line


class Alone:
    """A team of one."""

    rank = 0
    size = 1

    def align(self, go_on: bool = True) -> bool:
        """Returns once all have called it, in all within about a microsecond, what rank 0 passes."""
        return go_on

    def gather(self, thing: Any) -> list[Any]:
        """Returns the values that all processes pass, in rank order."""
        return [thing]


class Team(Alone):
    """Processes that share a folder.

    Barriers go through words of a mapped file. Rank r's two words hold 2 * (number of its last even or odd barrier) +
    what it passes: a word is written again two barriers later, when everybody has read it.
    """

    def __init__(self, folder: pathlib.Path, rank: int, size: int):
        self.rank, self.size, self._folder = rank, size, folder
        self._barriers = self._gathered = 0
        with open(folder / "barriers", "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 8 * _WORDS * size)).cast("q")

    @staticmethod
    def prepare(folder: pathlib.Path, size: int) -> None:
        """Before the processes start."""
        (folder / "barriers").write_bytes(bytes(8 * _WORDS * size))

    def align(self, go_on: bool = True) -> bool:
        self._barriers += 1
        parity = self._barriers % 2
        self._words[_WORDS * self.rank + parity] = 2 * self._barriers + go_on
        deadline = time.monotonic() + _DEADLINE_S
        for other in range(self.size):
            while self._words[_WORDS * other + parity] >> 1 < self._barriers:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {other} did not come to barrier {self._barriers} in {_DEADLINE_S} s")
                os.sched_yield()
        return bool(self._words[parity] & 1)

    def gather(self, thing: Any) -> list[Any]:
        self._gathered += 1
        (self._folder / f"{self._gathered}.{self.rank}").write_bytes(pickle.dumps(thing))
        self.align()
        things = [pickle.loads((self._folder / f"{self._gathered}.{r}").read_bytes()) for r in range(self.size)]
        # All have come to this gathering, so all have read the one before.
        (self._folder / f"{self._gathered - 1}.{self.rank}").unlink(missing_ok=True)
        return things
