"""sglang-jax's transfer of caches between prefill and decode over jaxcomm.transfer (README.md).

The states of requests, their acknowledgements and their time limits stay those of sglang-jax's manager. Only its
transfer, jax.experimental.transfer, is replaced.
"""

from typing import Any

import jax
from sgl_jax.srt.disaggregation.base.transfer import DecodeAdmission, DecodeTransferContext
from sgl_jax.srt.disaggregation.jax_transfer.conn import JaxTransferKVManager

from jaxcomm import transfer

PyTree = Any
_VERSION = 0  # of each object: an identifier of sglang-jax has one payload


class Transfer:
    """What sglang-jax's manager asks of its transfer: register_pull(), pull() and release().

    Args:
      endpoint: of this process.
      timeout_s: limit of a pull.
    """

    def __init__(self, endpoint: transfer.Endpoint, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self.addresses: dict[str, str] = {}  # sglang-jax's host and port of a prefill process -> its endpoint

    def register_pull(self, uuid: str, data: PyTree) -> None:
        transfer.publish(self._endpoint, uuid, [data], _VERSION)

    def pull(self, uuid: str, spec: PyTree, remote_addr: str) -> PyTree:
        writers = transfer.Group(self.addresses[remote_addr])
        shardings = [jax.tree.map(lambda leaf: leaf.sharding, spec)]
        future = transfer.fetch(self._endpoint, writers, uuid, _VERSION, shardings, timeout_s=self._timeout_s)
        (data,) = future.result()
        for want, got in zip(jax.tree.leaves(spec), jax.tree.leaves(data), strict=True):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise ValueError(f"pull: {uuid!r} has {got.dtype}{got.shape}, expected {want.dtype}{want.shape}")
        return data

    def release(self, uuid: str) -> None:
        transfer.retire(self._endpoint, uuid, _VERSION)


class KVManager(JaxTransferKVManager):
    """A TransferBackend of sglang-jax.

    Args:
      endpoint: of this process.
      zmq_notifier: sglang-jax's channel for acknowledgements.
      pull_timeout_seconds: as in JaxTransferKVManager, as are the options.
    """

    engine_name = "jaxcomm"

    def __init__(
        self, endpoint: transfer.Endpoint, zmq_notifier: Any, *, pull_timeout_seconds: float = 30.0, **options: Any
    ) -> None:
        self._address = endpoint.address
        pulls = Transfer(endpoint, pull_timeout_seconds)
        super().__init__(pulls, zmq_notifier, pull_timeout_seconds=pull_timeout_seconds, **options)

    def prefill_transport_metadata(self, dp_rank: int = 0) -> dict[str, object]:
        """Decode processes get it from sglang-jax's bootstrap server."""
        return super().prefill_transport_metadata(dp_rank) | {"address": self._address}

    def try_start_decode(self, context: DecodeTransferContext) -> DecodeAdmission:
        peer: Any = context.peer_info
        self.wrapper.addresses[f"{peer['host']}:{peer['transfer_port']}"] = peer["transport_metadata"]["address"]
        return super().try_start_decode(context)
