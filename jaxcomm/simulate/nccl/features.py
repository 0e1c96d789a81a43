"""What `formulas` reads, as arrays: one entry per prediction."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Features:
    """Bytes are those of nccl-tests: of the larger buffer of a rank. Rates are in B/us (GB/s times 1000)."""

    op: np.ndarray
    ranks: np.ndarray
    domain: np.ndarray  # ranks that share one domain
    host: np.ndarray  # ranks of the group in one host
    nodes: np.ndarray  # domains of the group
    bytes: np.ndarray
    link: np.ndarray
    hbm: np.ndarray
    nic: np.ndarray
    largest: np.ndarray  # ranks of a whole domain
    bus: np.ndarray
    ll: np.ndarray
    ll128: np.ndarray
    old_ll: np.ndarray  # rules.has_old_ll
    kind: np.ndarray

    @classmethod
    def of(cls, records: list[tuple[Any, ...]]) -> "Features":
        """The fields of each entry, in their order."""
        columns = list(zip(*records, strict=True)) if records else [()] * len(dataclasses.fields(cls))
        return cls(*(np.array(c, dtype=float if 1 <= i <= 12 else None) for i, c in enumerate(columns)))

    def take(self, index: Any) -> "Features":
        return Features(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})
