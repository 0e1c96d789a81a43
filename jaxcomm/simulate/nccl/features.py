"""Rows as arrays: what `formulas` reads."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxcomm.simulate.nccl import hardware
from jaxcomm.simulate.nccl.table import Row, Table

_BYTES = {"float8": 1, "bfloat16": 2, "float16": 2, "": 2}


@dataclasses.dataclass(frozen=True)
class Features:
    """One entry per row. Bytes as in the table; rates in B/us (GB/s times 1000)."""

    op: np.ndarray
    ranks: np.ndarray
    domain: np.ndarray  # ranks that share one domain
    host: np.ndarray  # ranks of the group in one host
    nodes: np.ndarray  # domains of the group
    bytes: np.ndarray  # EP: what one rank sends to others
    link: np.ndarray
    hbm: np.ndarray
    nic: np.ndarray
    largest: np.ndarray  # ranks of a whole domain: a mesh gives each pair 1 / (largest - 1) of link
    bus: np.ndarray
    ll: np.ndarray
    ll128: np.ndarray
    mesh: np.ndarray
    old_ll: np.ndarray  # NCCL until 2.28: LL for messages counts the channels a peer may have
    kind: np.ndarray

    def __len__(self) -> int:
        return len(self.ranks)

    def take(self, index: Any) -> "Features":
        return Features(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})


def expert_bytes(row: Row) -> float:
    """Bytes one rank sends to others in dispatch or combine.

    Dispatch sends a token once to each rank that owns one of its experts: (n - 1)(1 - (1 - 1/n)^k) ranks expected.
    Combine returns one copy for each expert: (n - 1)/n of all. Tables without a shape get DeepSeek's, 7168 and 8.
    """
    topk = int(row.notes.get("topk", "8"))
    if row.bytes is not None:
        logical = row.bytes
    else:
        token = int(row.notes.get("hidden", "7168")) * _BYTES.get(row.dtype, 4)
        logical = int(row.notes.get("tokens", "128")) * topk * token
    n = row.ranks
    if row.op == "ep_dispatch":
        return logical / topk * (n - 1) * -math.expm1(topk * math.log1p(-1 / n)) if n > 1 else 0.0
    return logical * (n - 1) / n


def _old_ll(library: str) -> bool:
    parts = library.split()
    if len(parts) > 1 and parts[0] == "NCCL" and parts[1][:1].isdigit():
        major, minor = (*parts[1].split("."), "0")[:2]
        return (int(major), int(minor)) < (2, 29)
    return True


def build(table: Table) -> Features:
    """Features of all rows. Rows of unknown hardware get NaN as link."""
    records = []
    for row in table.rows:
        kind = hardware.device(row.hardware)
        known = kind or hardware.devices()[0]
        domain = hardware.domain_ranks(row, known)
        records.append(
            (
                row.op,
                row.ranks,
                domain,
                min(row.ranks, row.ranks_per_node),
                -(-row.ranks // domain),
                expert_bytes(row) if row.op.startswith("ep_") else row.bytes,
                known.link * 1e3 if kind else math.nan,
                known.hbm * 1e3,
                hardware.nic_rate(row, known) * 1e3,
                known.domain,
                known.bus * 1e3,
                known.ll * 1e3,
                known.ll128 * 1e3,
                known.kind == "mesh",
                _old_ll(row.library),
                kind.name if kind else "",
            )
        )
    columns = list(zip(*records, strict=True)) if records else [()] * len(dataclasses.fields(Features))
    return Features(*(np.array(c, dtype=float if i in range(1, 13) else None) for i, c in enumerate(columns)))
