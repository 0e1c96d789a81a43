"""Data-sheet rates of a row: what the links, the memory and the network adapters could do at best."""

import dataclasses
import functools
import importlib.resources
import re
import tomllib

from jaxcomm.simulate.nccl.table import Row


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
    """The device that a table's hardware column names, or None."""
    name = hardware.lower()
    return next((d for d in devices() if any(part in name for part in d.match)), None)


def sisters(name: str) -> list[str]:
    """Devices with the same links and the same constants of NCCL, `name` included: they behave alike."""
    mine = next(d for d in devices() if d.name == name)
    return [
        d.name for d in devices() if (d.link, d.bus, d.domain, d.kind) == (mine.link, mine.bus, mine.domain, mine.kind)
    ]


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
