"""Generated mutants, and results of all mutants."""

import csv
import hashlib
import pathlib
import random
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).parent
SURVIVED, NOT_REACHED, CAUGHT, TIMED_OUT = "survived", "not reached", "caught", "timed out"


class Mutant(NamedTuple):
    """A mutant that the syntax generates. `place` is where its generator finds it again.

    In C++, the place is the number of its switch. In Python, it is the number of a node in the tree, and the index of
    the operator's change at this node.
    """

    file: str
    line: int
    kind: str
    text: str
    change: str
    place: Any

    @property
    def key(self):
        return self.file, self.text, self.change


class Result(NamedTuple):
    """A mutant and its result. `text` is the line, `change` the edit, `test` the test that caught it."""

    folder: str
    file: str
    line: int
    kind: str
    text: str
    change: str
    result: str
    test: str = ""
    seconds: float = 0

    @property
    def caught(self):
        return self.result in (CAUGHT, TIMED_OUT)


def write(results, path):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Result._fields)
        writer.writerows(sorted(results))


def order(seed, *parts):
    """A number for each mutant that depends on its text and the seed only."""
    return hashlib.sha256("\0".join(map(str, (seed, *parts))).encode()).hexdigest()


def sample(mutants, count, seed, kind, key):
    """Selects `count` mutants, a share of each kind. The seed determines the selection."""
    if not count or count >= len(mutants):
        return list(mutants)
    kinds = {}
    for mutant in sorted(mutants, key=lambda mutant: order(seed, *key(mutant))):
        kinds.setdefault(kind(mutant), []).append(mutant)
    shares = {name: count * len(group) / len(mutants) for name, group in kinds.items()}
    quotas = {name: int(share) for name, share in shares.items()}
    by_rest = sorted(kinds, key=lambda name: (quotas[name] - shares[name], name))
    for name in by_rest[: count - sum(quotas.values())]:
        quotas[name] += 1
    chosen = [mutant for name, group in sorted(kinds.items()) for mutant in group[: quotas[name]]]
    random.Random(str(seed)).shuffle(chosen)
    return chosen


def table(results):
    """Numbers of mutants and caught mutants per folder."""
    rows = [("folder", "mutants", "caught", "timed out", "survived", "not reached", "rate")]
    for folder in [*sorted({result.folder for result in results}), "all"]:
        own = [result.result for result in results if folder in (result.folder, "all")]
        left = own.count(SURVIVED), own.count(NOT_REACHED)
        rate = f"{100 - 100 * sum(left) / len(own):.0f} %" if own else "-"
        rows.append((folder, len(own), own.count(CAUGHT), own.count(TIMED_OUT), *left, rate))
    lines = [f"{row[0]:<18}" + "".join(f"{cell!s:>13}" for cell in row[1:]) for row in rows]
    return "\n".join(lines)


def missed(results):
    return [result for result in results if not result.caught]


def describe(result):
    return f"{result.file}:{result.line}: {result.result}: {result.change}\n    {result.text}"


def sample_passes(results):
    """Whether the tests catch all mutants made by hand, and at least half of the others."""
    generated = [result for result in results if result.kind != "hand"]
    left = missed(results)
    caught_by_hand = not any(result.kind == "hand" for result in left)
    return bool(results) and caught_by_hand and 2 * len(left) <= len(generated)
