"""Rows of a table as features."""

import math
import re

from jaxcomm.simulate.nccl import hardware, rules
from jaxcomm.simulate.nccl.features import Features
from jaxcomm.simulate.nccl.hardware import Device
from tools.simulator.table import Row, Table

_BYTES = {"float8": 1, "bfloat16": 2, "float16": 2, "": 2}


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


def domain_ranks(row: Row, kind: Device) -> int:
    """Ranks of the row's group that share one NVLink or xGMI domain; 1 if the row turns those links off."""
    text = row.interconnect.lower()
    if "nvlink and shared memory disabled" in text or "rdma only" in text:
        return 1
    if kind.domain > row.ranks_per_node and ("domain" in text or "rack" in text or "nvl72" in row.hardware.lower()):
        return min(row.ranks, kind.domain)
    return min(row.ranks, row.ranks_per_node)


def nic_rate(row: Row, kind: Device) -> float:
    """GB/s of the network adapters of one rank: the row's interconnect, else the device's usual adapter."""
    for part in re.split(r"[;+]", row.interconnect):
        found = re.search(r"(?:(\d+)x\s*)?(\d+)\s*gb/s(.*)", part, re.IGNORECASE)
        if not found:
            continue
        rate = int(found[1] or 1) * int(found[2]) / 8
        share = row.ranks_per_node if "per node" in found[3].lower() else 1
        if 0.5 < rate < 10000:
            return rate / min(share, 8)
    return kind.nic


def is_mesh(row: Row) -> bool:
    """Whether each pair of devices has a link of its own."""
    kind = hardware.device(row.hardware)
    return kind is not None and kind.kind == "mesh"


def _old_ll(library: str) -> bool:
    """As rules.has_old_ll; libraries without a version count as old."""
    parts = library.split()
    return len(parts) < 2 or parts[0] != "NCCL" or not parts[1][:1].isdigit() or rules.has_old_ll(parts[1])


def features(table: Table) -> Features:
    """Features of all rows. Rows of unknown hardware get NaN as link."""
    records = []
    for row in table.rows:
        kind = hardware.device(row.hardware)
        known = kind or hardware.devices()[0]
        domain = domain_ranks(row, known)
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
                nic_rate(row, known) * 1e3,
                known.domain,
                known.bus * 1e3,
                known.ll * 1e3,
                known.ll128 * 1e3,
                _old_ll(row.library),
                kind.name if kind else "",
            )
        )
    return Features.of(records)
