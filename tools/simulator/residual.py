"""The second layer: how measurements differ from the plan model, interpolated between neighbouring points.

A Gaussian process on the logarithm of measured over modelled time. With one series and this kernel it is close to
linear interpolation in log bytes. Points of sister machines, other patterns and other scales add correlated
information. Far from all points the mean falls to zero and leaves the plan model.
Source: Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5.
"""

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np

from tools.simulator.table import Row

# Chosen by cross-validation inside the rows that the hold-out `points` trains on.
SIZE_LENGTH = 4.0  # doublings of bytes
SCALE_LENGTH = 1.0  # e-folds of ranks
SISTER = 0.95  # correlation of two machines of one block
OTHER = 0.4  # of two patterns, dtypes or options
OWN = 0.1  # part that one series has alone
NUGGET = 0.015  # repeatability of a timing
_LEAST_AMPLITUDE = 0.04

TEXTS = ("form", "repo", "interconnect", "op", "library", "hardware", "option")
ENTRY = (*TEXTS, "ranks", "size", "log_ratio", "noise")  # keys of a series in ``to_data``


@dataclasses.dataclass(frozen=True)
class Knots:
    """One entry per point. `texts` are those of TEXTS."""

    texts: np.ndarray  # (points, len(TEXTS))
    ranks: np.ndarray
    size: np.ndarray
    noise: np.ndarray  # relative, from the digits that a source prints

    @classmethod
    def of(cls, rows: tuple[Row, ...], forms: list[str]) -> "Knots":
        texts = [
            (form, row.repo, row.interconnect, row.op, row.library, row.hardware, _option(row))
            for row, form in zip(rows, forms, strict=True)
        ]
        return cls(
            np.array(texts, dtype=object).reshape(-1, len(TEXTS)),
            np.array([row.ranks for row in rows], float),
            np.array([row.size for row in rows], float),
            np.array([_rounding(row) for row in rows], float),
        )

    def take(self, index: Any) -> "Knots":
        return Knots(self.texts[index], self.ranks[index], self.size[index], self.noise[index])

    def blocks(self) -> dict[tuple[str, ...], np.ndarray]:
        """Correlated points: one op of one library and harness on one kind of network."""
        found = defaultdict(list)
        for i, text in enumerate(self.texts):
            found[tuple(text[:5])].append(i)
        return {key: np.array(index) for key, index in found.items()}

    def series(self) -> list[tuple[Any, ...]]:
        return [(*text, n) for text, n in zip(map(tuple, self.texts), self.ranks, strict=True)]


def _option(row: Row) -> str:
    keys = ("algo", "pattern", "place", "sms", "hidden", "topk", "timing", "nic_interleave")
    return "|".join((row.dtype, str(row.ranks_per_node), *(row.notes.get(k, "") for k in keys)))


def _rounding(row: Row) -> float:
    try:
        return float(row.notes.get("rounding", "0").strip("+-%")) / 100
    except ValueError:
        return 0.0


def _kernel(a: Knots, b: Knots) -> np.ndarray:
    def position(k: Knots) -> np.ndarray:
        # Messages of an all_to_all are parts of its buffer; protocols switch by message.
        messages = k.texts[:, 3] == "all_to_all"
        return np.asarray(np.log2(k.size) - np.where(messages, np.log2(k.ranks), 0))

    size = np.exp(-np.abs(position(a)[:, None] - position(b)) / SIZE_LENGTH)
    scale = np.exp(-np.abs(np.log(a.ranks)[:, None] - np.log(b.ranks)) / SCALE_LENGTH)
    machine = a.texts[:, None, 5] == b.texts[:, 5]
    option = a.texts[:, None, 6] == b.texts[:, 6]
    own = machine & option & (a.ranks[:, None] == b.ranks)
    return np.asarray(
        size * ((1 - OWN) * scale * np.where(machine, 1, SISTER) * np.where(option, 1, OTHER) + OWN * own)
    )


@dataclasses.dataclass(frozen=True)
class Block:
    knots: Knots
    amplitude: float
    inverse: np.ndarray
    weights: np.ndarray


class Residual:
    def __init__(self, knots: Knots, values: np.ndarray):
        self.knots, self.values = knots, values
        self._blocks: dict[tuple[str, ...], Block] = {}
        self.index = knots.blocks()

    def block(self, key: tuple[str, ...]) -> Block | None:
        if key not in self._blocks and key in self.index:
            index = self.index[key]
            knots, values = self.knots.take(index), self.values[index]
            amplitude = max(float(np.sqrt(np.mean(values**2))), _LEAST_AMPLITUDE)
            # A printed number is uniform inside its rounding: half a digit over sqrt(3).
            noise = NUGGET**2 + (knots.noise / np.sqrt(3)) ** 2
            inverse = np.linalg.inv(amplitude**2 * _kernel(knots, knots) + np.diag(noise))
            self._blocks[key] = Block(knots, amplitude, inverse, inverse @ values)
        return self._blocks.get(key)

    def predict(self, knots: Knots) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the logarithm at other points; 0 and NaN where no block has points."""
        mean, deviation = np.zeros(len(knots.size)), np.full(len(knots.size), np.nan)
        for key, index in knots.blocks().items():
            block = self.block(key)
            if block is None:
                continue
            k = block.amplitude**2 * _kernel(knots.take(index), block.knots)
            mean[index] = k @ block.weights
            variance = block.amplitude**2 + NUGGET**2 - np.einsum("ij,jk,ik->i", k, block.inverse, k, optimize=True)
            deviation[index] = np.sqrt(np.maximum(variance, NUGGET**2))
        return mean, deviation

    def exact(self, knots: Knots) -> np.ndarray:
        """Values at points that are knots themselves, else NaN: a measured point returns itself."""
        points = dict(zip(zip(self.knots.series(), self.knots.size, strict=True), self.values, strict=True))
        return np.array([points.get(p, np.nan) for p in zip(knots.series(), knots.size, strict=True)], float)

    @classmethod
    def from_data(cls, entries: list[dict[str, Any]]) -> "Residual":
        texts, ranks, size, noise, values = [], [], [], [], []
        for entry in entries:
            count = len(entry["size"])
            texts += [tuple(entry[t] for t in TEXTS)] * count
            ranks += [entry["ranks"]] * count
            size += entry["size"]
            noise += entry.get("noise", [0.0] * count)
            values += entry["log_ratio"]
        array = np.array(texts, dtype=object).reshape(-1, len(TEXTS))
        knots = Knots(array, np.array(ranks, float), np.array(size, float), np.array(noise, float))
        return cls(knots, np.array(values, float))
