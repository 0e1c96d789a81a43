"""Data-sheet rates of devices: what the links, the memory and the network adapters could do at best."""

import dataclasses
import functools
import importlib.resources
import tomllib


@dataclasses.dataclass(frozen=True)
class Device:
    """Parameters of one kind of accelerator, GB/s per device and direction; data/hardware.toml says more."""

    name: str
    match: tuple[str, ...]
    link: float
    hbm: float
    domain: int
    kind: str
    bus: float
    ll: float
    ll128: float
    nic: float
    origin: str


@functools.cache
def devices() -> tuple[Device, ...]:
    text = (importlib.resources.files("jaxcomm.simulate.nccl") / "data" / "hardware.toml").read_text(encoding="utf-8")
    return tuple(
        Device(name=name, match=tuple(entry.pop("match")), **entry) for name, entry in tomllib.loads(text).items()
    )


def device(hardware: str) -> Device | None:
    """The device that a text names, or None."""
    name = hardware.lower()
    return next((d for d in devices() if any(part in name for part in d.match)), None)
