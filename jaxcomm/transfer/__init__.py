"""Arrays and caches between jobs, without jax.distributed (docs/guide/transfer.md)."""

from jaxcomm.transfer._endpoint import Endpoint, Group, Limits
from jaxcomm.transfer._errors import (
    Cancelled,
    NotFound,
    PeerLost,
    Refused,
    Revoked,
    TransferError,
    TransferTimeout,
    VersionGone,
)
from jaxcomm.transfer._pages import Offer, PageLayout, PagePool, Pull, offer, pull
from jaxcomm.transfer._programs import emit, insert
from jaxcomm.transfer._weights import fetch, publish, retire, watch

__all__ = [
    "Cancelled",
    "Endpoint",
    "Group",
    "Limits",
    "NotFound",
    "Offer",
    "PageLayout",
    "PagePool",
    "PeerLost",
    "Pull",
    "Refused",
    "Revoked",
    "TransferError",
    "TransferTimeout",
    "VersionGone",
    "emit",
    "fetch",
    "insert",
    "offer",
    "publish",
    "pull",
    "retire",
    "watch",
]
