"""The processes of this machine that measure together: they start each repetition together and exchange results."""

import mmap
import os
import pathlib
import pickle
import time
from typing import Any

# Longer than the time between two synchronizations of a process, even with gloo's slowest repetitions.
_DEADLINE_S = 300
_WORDS = 8  # per process: a cache line


class Alone:
    """A team of one."""

    rank = 0
    size = 1

    def align(self, go_on: bool = True) -> bool:
        """Waits until all processes have called it and returns the argument of rank 0.

        The calls return within about a microsecond of each other.
        """
        return go_on

    def gather(self, thing: Any) -> list[Any]:
        """Returns the arguments of all processes, by rank."""
        return [thing]


class Team(Alone):
    """Processes that share a folder.

    Synchronizations use words of a mapped file. Each rank has one word for its even and one for its odd
    synchronizations: 2 * (number of the synchronization) + (argument of align). A rank overwrites a word two
    synchronizations later, when all processes have read it.
    """

    def __init__(self, folder: pathlib.Path, rank: int, size: int):
        self.rank, self.size, self._folder = rank, size, folder
        self._synced = self._gathered = 0
        with open(folder / "synchronization", "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 8 * _WORDS * size)).cast("q")

    @staticmethod
    def prepare(folder: pathlib.Path, size: int) -> None:
        """Creates the mapped file, before the processes start."""
        (folder / "synchronization").write_bytes(bytes(8 * _WORDS * size))

    def align(self, go_on: bool = True) -> bool:
        self._synced += 1
        parity = self._synced % 2
        self._words[_WORDS * self.rank + parity] = 2 * self._synced + go_on
        deadline = time.monotonic() + _DEADLINE_S
        for other in range(self.size):
            while self._words[_WORDS * other + parity] >> 1 < self._synced:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"process {other} did not reach synchronization {self._synced} within {_DEADLINE_S} s"
                    )
                os.sched_yield()
        return bool(self._words[parity] & 1)

    def gather(self, thing: Any) -> list[Any]:
        self._gathered += 1
        (self._folder / f"{self._gathered}.{self.rank}").write_bytes(pickle.dumps(thing))
        self.align()
        things = [pickle.loads((self._folder / f"{self._gathered}.{r}").read_bytes()) for r in range(self.size)]
        # All processes have called this gather, so all have read the files of the previous one.
        (self._folder / f"{self._gathered - 1}.{self.rank}").unlink(missing_ok=True)
        return things
