"""Exceptions of transfers."""


class TransferError(RuntimeError):
    """A transfer failed. The text names endpoint and object."""


class NotFound(TransferError):
    """The source has no such object, version or ticket."""


class VersionGone(TransferError):
    """The version was retired, or the ticket was used before."""


class Revoked(TransferError):
    """The source ended the lease or used the memory again. No byte of it was shown."""


class PeerLost(TransferError):
    """The other endpoint died, left, cannot be reached, or failed to prove the secret."""


class TransferTimeout(TransferError, TimeoutError):
    """The other endpoint lives, as far as is known, but did not answer within timeout_s."""


class Refused(TransferError):
    """The source does not serve this request: another layout, another reader, boxes outside of the array."""


class Cancelled(TransferError):
    """This side cancelled the transfer or closed its endpoint."""


# By the numbers of Code in ffi/transfer/protocol.h.
_BY_CODE = (TransferError, NotFound, VersionGone, Revoked, PeerLost, TransferTimeout, Refused, Cancelled)


def check(code: int, text: str, what: str) -> None:
    """Raises the exception of a native error code, if it is one."""
    if code:
        raise _BY_CODE[code](f"jaxcomm.transfer: {what}: {text}")
