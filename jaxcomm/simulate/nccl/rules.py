"""NCCL's choices of protocol and channels, by its own constants.

Origin: src/graph/tuning.cc and src/enqueue.cc of NVIDIA/nccl 2.27. The choice is the library's, even
where another protocol would be faster.
"""

import numpy as np

from jaxcomm.simulate.nccl.features import Features

_KIB = 1024.0
# us before the first step and per step of a ring on NVLink, for LL, LL128, Simple.
_BASE = (6.6, 14.0, 8.4)
_HOP = (0.6, 1.9, 3.4)
_RING_CHANNELS = 24


def ring_protocol(q: Features) -> np.ndarray:
    """Protocol of a ring in one NVLink domain: 0 LL, 1 LL128, 2 Simple; the least of NCCL's own estimates."""
    f = np.where(q.op == "all_reduce", 2.0, 1.0)
    s, sent = f * (q.ranks - 1), f * (q.ranks - 1) / q.ranks * q.bytes
    bus = np.where(q.bus > 0, q.bus, q.link)
    caps = (
        np.minimum(np.where(q.ll > 0, q.ll, np.inf), bus / 2),
        np.minimum(0.92 * bus, np.where(q.ll128 > 0, _RING_CHANNELS * q.ll128, np.inf)),
        bus,
    )
    return np.asarray(np.argmin([b + h * s + sent / c for b, h, c in zip(_BASE, _HOP, caps, strict=True)], axis=0))


def message_channels(largest: np.ndarray, ranks: np.ndarray, message: np.ndarray) -> np.ndarray:
    """Channels of one message: 32 / domain as a power of two, doubled until a part has 16 MiB (32 chunks)."""
    start = np.exp2(np.maximum(np.floor(np.log2(32 / ranks)), 0))
    doublings = np.ceil(np.log2(np.maximum(message / start / (16 * _KIB * _KIB), 1)))
    return np.asarray(np.minimum(start * np.exp2(doublings), 32))


def has_old_ll(version: str) -> bool:
    """Whether LL for messages counts the channels that a peer may have: NCCL until 2.28. `version` is "2.28.3"."""
    major, minor = (*version.split("."), "0")[:2]
    return (int(major), int(minor)) < (2, 29)


def message_ll_limit(channels: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Largest message in LL: 16 KiB times the channels that a peer may have (has_old_ll), or those in use."""
    return 16 * _KIB * np.where(old, 32, channels)


def has_multicast(kind: np.ndarray) -> np.ndarray:
    """NVLS needs the switches of H100 and later."""
    return np.isin(kind, ("H100", "H200", "H800", "B200", "B300", "GB200", "GB300"))
