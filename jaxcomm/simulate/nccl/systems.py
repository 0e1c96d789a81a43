"""Parameters of the formulas for each measured system, and for systems near it."""

import dataclasses

import numpy as np

from jaxcomm.simulate.nccl import hardware
from jaxcomm.simulate.nccl.features import Features
from jaxcomm.simulate.nccl.table import Row, Table

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Prior:
    """Normal distribution of a parameter's logarithm: exp(mean) = center."""

    center: float
    spread: float


@dataclasses.dataclass(frozen=True)
class System:
    """Parameters of one system. `identified`: share of the prior's variance that the data removed, 0 to 1."""

    parameters: dict[str, float]
    identified: dict[str, float]
    device: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Systems:
    fitted: dict[Key, System]
    priors: dict[str, dict[str, Prior]]  # of an unmeasured system, by form

    def lookup(self, key: Key, device: str) -> tuple[dict[str, float], str]:
        """Parameters for a row, and where they come from: `system`, `device`, `form` or `guess`."""
        if key in self.fitted:
            return self.fitted[key].parameters, "system"
        # Forms for single kernels take values from the same kernel only: key[3:5] is its op and library.
        related = {k: s for k, s in self.fitted.items() if k[0] == key[0] and k[3:5] == key[3:5]}
        prior = {name: p.center for name, p in self.priors[key[0]].items()}
        near = [s for s in related.values() if s.device == device]
        near = near or [s for s in related.values() if s.device in hardware.sisters(device)]
        if near:
            return {name: _blend(center, name, near) for name, center in prior.items()}, "device"
        if not related:
            return prior, "guess"
        # The launch belongs to the harness more than to the device.
        harness = [s for k, s in related.items() if k[1] == key[1]]
        if harness:
            prior["launch"] = _blend(prior["launch"], "launch", harness)
        return prior, "form"


def _blend(center: float, name: str, systems: list[System]) -> float:
    """Mean of logarithms: weights say how well each system identifies the parameter; the prior has a small one."""
    weights = np.array([s.identified[name] for s in systems] + [0.05])
    values = np.log([s.parameters[name] for s in systems] + [center])
    return float(np.exp(weights @ values / weights.sum()))


def form(row: Row, q: Features, i: int) -> str:
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


def describe(table: Table, q: Features) -> tuple[list[str], list[Key]]:
    """Form and system of each row."""
    forms = [form(row, q, i) for i, row in enumerate(table.rows)]
    return forms, [system(row, name) for row, name in zip(table.rows, forms, strict=True)]
