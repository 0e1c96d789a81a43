"""Transfers of sglang-jax's own manager over transfer_backend.py.

    git clone https://github.com/sgl-project/sglang-jax
    PYTHONPATH=.:sglang-jax/python python -m integrations.sglang_jax.check

A prefill side on 2 devices and a decode side on 3 others, in one process.
"""

import secrets
import socket
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.disaggregation.base.kv_manager import KVPoll
from sgl_jax.srt.disaggregation.base.transfer import DecodeTransferContext, PrefillTransferContext
from sgl_jax.srt.disaggregation.common.zmq_notifier import ZmqPullNotifier

from integrations.sglang_jax.transfer_backend import KVManager
from jaxcomm import transfer

LAYERS, SHAPE = 2, (4, 6, 2)  # pages, heads, elements
LIMIT_S = 60.0


def manager(role: str, endpoint: transfer.Endpoint, secret: str) -> tuple[KVManager, int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    notifier = ZmqPullNotifier(role, "127.0.0.1", port, shared_secret=secret)
    notifier.start()
    return KVManager(endpoint, notifier), port


def caches(request: int) -> list[np.ndarray]:
    count = int(np.prod(SHAPE))
    return [
        (1000 * request + 100 * layer + np.arange(count)).reshape(SHAPE).astype(np.float32) for layer in range(LAYERS)
    ]


def start_prefill(prefill: KVManager, request: int, sharding: NamedSharding) -> Any:
    payload = {"kv": [jax.device_put(layer, sharding) for layer in caches(request)]}
    return prefill.start_prefill(
        PrefillTransferContext(
            req_id=str(request),
            transfer_id=f"transfer-{request}",
            bootstrap_room=None,
            dp_rank=0,
            buffer_id=None,
            payload_factory=lambda: payload,
            block_ids_factory=list,
        )
    ).sender


def start_decode(decode: KVManager, peer: dict[str, object], request: int, sharding: NamedSharding, dtype: Any) -> Any:
    spec = [jax.ShapeDtypeStruct(SHAPE, dtype, sharding=sharding)] * LAYERS
    return decode.try_start_decode(
        DecodeTransferContext(
            req_id=str(request),
            transfer_id=f"transfer-{request}",
            bootstrap_room=None,
            decode_dp_rank=0,
            prefill_dp_rank=0,
            peer_info=peer,
            kv_indices=None,
            page_size=1,
            prompt_tokens=SHAPE[0],
            spec_factory=lambda: spec,
        )
    ).receiver


def ended(handle: Any) -> KVPoll:
    deadline = time.monotonic() + LIMIT_S
    while (state := handle.poll()) not in (KVPoll.SUCCESS, KVPoll.FAILED):
        assert time.monotonic() < deadline, f"{handle.req_id} is {state} after {LIMIT_S} s"
        time.sleep(0.01)
    return state


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    devices, secret = np.array(jax.devices()), secrets.token_hex(16)
    pages = NamedSharding(Mesh(devices[:2], ("x",)), P("x"))
    heads = NamedSharding(Mesh(devices[4:7], ("x",)), P(None, "x"))
    with transfer.Endpoint("prefill", secret=secret) as one, transfer.Endpoint("decode", secret=secret) as other:
        (prefill, port), (decode, _) = manager("prefill", one, secret), manager("decode", other, secret)
        metadata = prefill.prefill_transport_metadata()
        peer = {"host": "127.0.0.1", "transfer_port": 1, "side_channel_port": port, "transport_metadata": metadata}
        try:
            sender = start_prefill(prefill, 1, pages)
            receiver = start_decode(decode, peer, 1, heads, np.float32)
            assert ended(receiver) == KVPoll.SUCCESS
            found: list[Any] = []
            receiver.commit(found.append)
            for got, want in zip(found[0], caches(1), strict=True):
                np.testing.assert_array_equal(got, want)
                assert got.sharding == heads
            assert ended(sender) == KVPoll.SUCCESS
            print("sharded by pages, fetched by heads: equal caches, acknowledged")

            sender = start_prefill(prefill, 2, pages)
            sender.abort()
            receiver = start_decode(decode, peer, 2, heads, np.float32)
            assert ended(receiver) == KVPoll.FAILED
            print("a prefill that was aborted: the decode side fails, with no data")

            sender = start_prefill(prefill, 3, pages)
            receiver = start_decode(decode, peer, 3, heads, np.int32)
            assert ended(receiver) == KVPoll.FAILED
            sender.abort()
            print("another element type: the decode side fails, with no data")
        finally:
            for side in (prefill, decode):
                side.graceful_shutdown(0.0)
                side.zmq_notifier.stop()


if __name__ == "__main__":
    main()
