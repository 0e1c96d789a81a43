"""The processes of this machine that measure together."""

import mmap
import os
import pathlib
import pickle
import time
from typing import Any

# Longer than the slowest repetitions of gloo between two barriers.
_DEADLINE_S = 300
_WORDS = 8  # per process, a cache line


class ProcessGroup:
    """Processes that start each repetition together and exchange their times. By default, this process alone.

    Barriers go through words of a mapped file. Each process has two words, for even and odd barriers. A word holds
    2 * (number of the barrier) + the argument of `align`. A process writes the word again two barriers later, when all
    processes have read it.
    """

    def __init__(self, folder: pathlib.Path = pathlib.Path(), rank: int = 0, size: int = 1):
        """Joins the group. `folder`: the argument of prepare(); unused in a group of one."""
        self.rank, self.size, self._folder = rank, size, folder
        self._barriers = self._gathered = 0
        if size > 1:
            with open(folder / "barriers", "r+b") as file:
                self._words = memoryview(mmap.mmap(file.fileno(), 8 * _WORDS * size)).cast("q")

    @staticmethod
    def prepare(folder: pathlib.Path, size: int) -> None:
        """Prepares the folder. Comes before the processes start."""
        (folder / "barriers").write_bytes(bytes(8 * _WORDS * size))

    def align(self, go_on: bool = True) -> bool:
        """Returns the value of rank 0. All ranks return within about one microsecond of each other.

        Raises:
          TimeoutError: another process did not call this.
        """
        if self.size == 1:
            return go_on
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
        """Returns the values that all processes pass, in rank order."""
        if self.size == 1:
            return [thing]
        self._gathered += 1
        (self._folder / f"{self._gathered}.{self.rank}").write_bytes(pickle.dumps(thing))
        self.align()
        things = [pickle.loads((self._folder / f"{self._gathered}.{r}").read_bytes()) for r in range(self.size)]
        # All processes have called this, so all have read the files of the previous call.
        (self._folder / f"{self._gathered - 1}.{self.rank}").unlink(missing_ok=True)
        return things
