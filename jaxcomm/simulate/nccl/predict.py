"""Times of NCCL on the devices of a cluster."""

import dataclasses

import numpy as np

from jaxcomm._request import NATIVE
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.collectives import time_text
from jaxcomm.simulate.nccl import formulas, hardware, parameters, rules
from jaxcomm.simulate.nccl.features import Features

# Native name -> name in tables of measurements.
_OPS = {name: name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")}
_OPS["permute"] = "collective_permute"
# Sizes are those of nccl-tests: the larger buffer of a rank.
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


def predict(op: str, operand: int, ranks: int, cluster: Cluster, name: str) -> Predicted:
    """The time of NCCL for an operand of this size.

    Raises:
      ValueError: an operation that NCCL's tables do not have, or hardware without measurements.
    """
    native = NATIVE[op]
    if native not in _OPS:
        raise ValueError(f"--compare {name}: no measurements of {op}; measured are {', '.join(_OPS)}")
    size = operand * ranks if native in _LARGER else operand
    kind = hardware.device(cluster.device)
    if kind is None or kind.kind != "switch":
        raise ValueError(f"--compare {name}: no measurements of {cluster.device} in domains of a switch")
    domain = cluster.levels[0].ranks
    if domain > kind.domain:
        raise ValueError(f"--compare {name}: measured domains of {kind.name} have at most {kind.domain} ranks")
    if ranks == 1:
        raise ValueError(f"--compare {name}: a group of one rank exchanges nothing")
    inside = min(ranks, domain)
    host = min(inside, _HOST if domain <= _HOST else _HOST_OF_RACK)
    adapter = cluster.levels[1].bytes_per_s * 1e-6 if len(cluster.levels) > 1 else kind.nic * 1e3
    links = (kind.link * 1e3, kind.hbm * 1e3, adapter, kind.domain)
    limits = (kind.bus * 1e3, kind.ll * 1e3, kind.ll128 * 1e3, rules.has_old_ll(name.removeprefix("nccl-")))
    nodes = -(-ranks // inside)
    found = Features.of([(_OPS[native], ranks, inside, host, nodes, size, *links, *limits, kind.name)])
    fitted, intervals = parameters.shipped()
    form = "cluster" if nodes > 1 else "domain"
    evidence, values = fitted[form][kind.name]
    time_s = float(formulas.FORMS[form](found, values)[0]) * 1e-6
    low, high = np.exp(intervals.of(evidence, size))
    return Predicted(name, op, ranks, operand, time_s, (time_s * float(low), time_s * float(high)), evidence)
