"""The parameters of each form, with the neutral prior that a fit starts from."""

import dataclasses

from jaxcomm.simulate.query import Queries
from jaxcomm.simulate.table import Row


@dataclasses.dataclass(frozen=True)
class Prior:
    """Normal distribution of a parameter's logarithm: exp(mean) = center."""

    center: float
    spread: float


# us for latencies, GB/s for channels, shares of the data sheet else. Spreads are wide where systems differ most.
_LAUNCH = Prior(15, 0.8)
PRIORS: dict[str, dict[str, Prior]] = {
    "domain": {
        "launch": _LAUNCH,
        "lambda_ll": Prior(1.0, 0.6),
        "lambda_ll128": Prior(2.4, 0.5),
        "lambda_simple": Prior(6.0, 0.6),
        "share_ll": Prior(0.33, 0.4),
        "share_ll128": Prior(0.6, 0.3),
        "share_simple": Prior(0.8, 0.2),
        "self": Prior(0.16, 0.4),
        "tree_inner": Prior(3.0, 0.6),
        "tree_outer": Prior(3.0, 0.6),
        "share_tree": Prior(0.45, 0.4),
        "nvls": Prior(80, 0.8),
        "share_nvls": Prior(0.5, 0.3),
        "per_peer": Prior(0.5, 0.6),
        "host_start": Prior(10, 0.8),
        "rendezvous": Prior(15, 0.6),
        "channel_ll": Prior(6.0, 0.3),
        "channel_simple": Prior(21.0, 0.2),
        "share_peer": Prior(0.7, 0.2),
    },
    "mesh": {
        "launch": Prior(50, 0.8),
        "permute": Prior(20, 0.8),
        "lambda_ll": Prior(5, 1.0),
        "lambda_ll128": Prior(12, 0.8),
        "lambda_simple": Prior(25, 0.8),
        "growth": Prior(0.1, 1.0),
        "share_ll": Prior(0.1, 0.5),
        "share_ll128": Prior(0.33, 0.4),
        "share_simple": Prior(0.8, 0.2),
        "self": Prior(0.35, 0.5),
        "per_peer": Prior(5, 1.0),
        "rendezvous": Prior(15, 0.8),
        "share_peer": Prior(0.8, 0.2),
    },
    "cluster": {
        "launch": Prior(30, 0.8),
        "per_step": Prior(1.0, 0.8),
        "hop_ll": Prior(50, 1.0),
        "hop_simple": Prior(200, 1.0),
        "nic_ll": Prior(0.3, 0.7),
        "nic_simple": Prior(0.85, 0.3),
        "share_simple": Prior(0.75, 0.3),
    },
    "stepwise": {
        "launch": Prior(30, 0.5),
        "hop_ll": Prior(12, 0.5),
        "hop_simple": Prior(18, 0.5),
        "nic_ll": Prior(0.04, 1.0),
        "nic_simple": Prior(0.95, 0.2),
    },
    "doubling": {
        "launch": Prior(25, 0.5),
        "hop_ll": Prior(14, 0.5),
        "hop_simple": Prior(18, 0.5),
        "nic_ll": Prior(0.2, 1.0),
        "nic_simple": Prior(0.95, 0.2),
    },
    "line": {
        "launch": Prior(8, 0.8),
        "per_peer": Prior(0.3, 1.0),
        "share_simple": Prior(0.3, 1.0),
        "nic_simple": Prior(0.7, 0.7),
    },
    "experts": {
        "launch": Prior(25, 0.8),
        "per_peer": Prior(0.3, 1.5),
        "share_simple": Prior(0.6, 0.7),
        "nic_simple": Prior(0.7, 0.7),
        "sharpness": Prior(1.4, 0.2),
    },
}


def form(row: Row, q: Queries, i: int) -> str:
    """The form that times a row."""
    if row.op.startswith("ep_"):
        return "experts"
    library = row.library
    if "CTRAN" in library:
        return "doubling" if "doubling" in row.notes.get("algo", "") else "stepwise"
    if (library and not library.startswith(("NCCL", "RCCL", "nccl", "rccl"))) or "device API" in library:
        return "line"
    if q.nodes[i] > 1:
        return "cluster"
    return "mesh" if q.mesh[i] else "domain"


def system(row: Row, form_name: str) -> tuple[str, ...]:
    """Key of the rows that share one set of parameters: harness and machine; for single kernels also op and library."""
    parts: tuple[str, ...] = (form_name, row.repo, row.hardware)
    if form_name in ("line", "stepwise", "experts", "doubling"):
        parts += (row.op, row.library, row.notes.get("algo", ""), row.notes.get("nic_interleave", ""))
    return parts
