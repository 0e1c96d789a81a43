"""Parameters of the formulas for each measured system, and for systems near it."""

import dataclasses

import numpy as np

from jaxcomm.simulate.nccl import hardware

Key = tuple[str, ...]  # form, harness and hardware; of single kernels also operation, library and options
# The measurements that a prediction without a system of its own rests on, by the origin of its parameters.
EVIDENCE = {"device": "harness", "form": "device", "guess": "guess"}


def sisters(name: str) -> list[str]:
    """Devices with the same links and the same constants of NCCL, `name` included: they behave alike."""
    mine = next(d for d in hardware.devices() if d.name == name)
    alike = (mine.link, mine.bus, mine.domain, mine.kind)
    return [d.name for d in hardware.devices() if (d.link, d.bus, d.domain, d.kind) == alike]


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
        near = near or [s for s in related.values() if s.device in sisters(device)]
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
