"""Times of NCCL and RCCL for the rows of a table, and of NCCL on the devices of a cluster."""

import dataclasses

import numpy as np

from jaxcomm._request import NATIVE
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.collectives import time_text
from jaxcomm.simulate.nccl import hardware, model, parameters, table

_OPS = {"permute": "collective_permute"}
# Bytes of a row are those of nccl-tests: the larger buffer of a rank.
_LARGER = ("all_gather",)
# GPUs of a host; in racks, a host has fewer than its domain.
_HOST, _HOST_OF_RACK = 8, 4


@dataclasses.dataclass(frozen=True)
class Predicted:
    """`evidence` says which measurements the interval rests on (docs/internals/simulate.md)."""

    name: str
    op: str
    ranks: int
    bytes: int
    time_s: float
    interval: tuple[float, float]
    evidence: str

    def __str__(self) -> str:
        low, high = self.interval
        return "\n".join(
            [
                f"{self.op} of {self.bytes} bytes among {self.ranks} ranks with {self.name}, from published timings",
                f"time        {time_text(self.time_s)}, interval {time_text(low)} to {time_text(high)}",
                f"evidence    {self.evidence}",
            ]
        )


def of_table(given: table.Table, fitted: parameters.Fitted) -> tuple[model.Prediction, np.ndarray]:
    """The prediction, and microseconds of each row: the time, and the ends of the interval. NaN where declined."""
    found = fitted.model.predict(given)
    size = np.array([row.size for row in given.rows], float)
    low, high = fitted.intervals.limits(found.evidence, size, found.deviation)
    return found, np.exp(np.stack([found.log_time, found.log_time + low, found.log_time + high], axis=1))


def predict(op: str, operand: int, ranks: int, cluster: Cluster, dtype: str, name: str) -> Predicted:
    """The time of NCCL for an operand of this size.

    Raises:
      ValueError: an operation that NCCL's tables do not have, or hardware without measurements.
    """
    native = NATIVE[op]
    row_op = _OPS.get(native, native)
    if row_op not in table.OPS:
        raise ValueError(f"--compare {name}: no measurements of {op}; measured are {', '.join(table.OPS)}")
    size = operand * ranks if native in _LARGER else operand
    kind = hardware.device(cluster.device)
    if kind is None or kind.kind != "switch":
        raise ValueError(f"--compare {name}: no measurements of {cluster.device} in domains of a switch")
    domain = cluster.levels[0].ranks
    if domain > kind.domain:
        raise ValueError(f"--compare {name}: measured domains of {kind.name} have at most {kind.domain} ranks")
    rate = f"1x {round(cluster.levels[1].bytes_per_s * 8e-9)} Gb/s per rank" if len(cluster.levels) > 1 else ""
    row = table.Row(
        line=1,
        repo="",
        hardware=f"{kind.name}{' NVL72' if domain > _HOST else ''}",
        interconnect=f"NVLink; {domain} in one domain; {rate}",
        op=row_op,
        dtype=dtype,
        ranks=ranks,
        ranks_per_node=min(ranks, domain if domain <= _HOST else _HOST_OF_RACK),
        bytes=float(size),
        notes={"lib": f"NCCL {name.removeprefix('nccl-')}"},
    )
    found, times_us = of_table(table.Table((), (), (row,)), parameters.shipped())
    if found.reasons:
        raise ValueError(f"--compare {name}: {found.reasons[0]}")
    time_s, low_s, high_s = (float(time_us) * 1e-6 for time_us in times_us[0])
    return Predicted(name, op, ranks, operand, time_s, (low_s, high_s), str(found.evidence[0]))
