"""vLLM's connector for caches between a prefill engine and a decode engine over jaxcomm.transfer (README.md).

vLLM creates it twice: in the scheduler, and in the worker that has the caches. vLLM's word for a cache page is block.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from jaxcomm import transfer

_THREADS = 16  # transfers of a worker at one time
_EVERY_S = 0.005  # between looks for free pages
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Send:
    """A prompt that a decode engine may read: `name` is the object that has the ticket."""

    name: str
    blocks: list[int]
    tokens: int


@dataclasses.dataclass
class Load:
    """A prompt to be read into own blocks. No blocks: all tokens are here, and the source may free its pages."""

    address: str
    name: str
    blocks: list[int]
    skip_tokens: int


@dataclasses.dataclass(eq=False)
class Offered:
    """Pages of the pool that a decode engine may read. They are free once it has read them and `written` is true."""

    offer: transfer.Offer
    name: str
    pages: list[int]
    written: bool = False  # no thread writes them any more


@dataclasses.dataclass
class Metadata(KVConnectorMetadata):
    """From the scheduler to the worker, by request."""

    sends: dict[str, Send]
    loads: dict[str, Load]


class JaxcommConnector(KVConnectorBase_V1):
    """Moves the cache of a prompt from a prefill engine (kv_producer) to a decode engine (kv_consumer).

    A step never waits for a transfer: vLLM runs a request once its blocks have arrived.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        if config.is_kv_producer == config.is_kv_consumer:
            raise ValueError(f"jaxcomm: kv_role must be kv_producer or kv_consumer, got {config.kv_role!r}")
        self._config, self._block_size = config, vllm_config.cache_config.block_size
        self._sends: dict[str, Send] = {}
        self._loads: dict[str, Load] = {}
        self._local_tokens: dict[str, int] = {}  # of requests that may load
        self._worker = Worker(config, self._block_size) if role == KVConnectorRole.WORKER else None

    # Scheduler

    def _source(self, request: Any) -> dict[str, Any] | None:
        """Where the cache of a request is, if that is another engine."""
        params = request.kv_transfer_params or {}
        loads = self._config.is_kv_consumer and params.get("do_remote_prefill")
        return params if loads and 0 < params["remote_tokens"] <= request.num_prompt_tokens else None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (source := self._source(request)) is None:
            return 0, False
        self._local_tokens[request.request_id] = num_computed_tokens
        count = max(source["remote_tokens"] - num_computed_tokens, 0)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (source := self._source(request)) is None:
            return
        source["do_remote_prefill"] = False  # vLLM calls again when the blocks have arrived
        tokens, skip = source["remote_tokens"], self._local_tokens.pop(request.request_id, 0)
        own: list[int] = []
        if num_external_tokens:
            own = blocks.get_block_ids()[0][skip // self._block_size : math.ceil(tokens / self._block_size)]
        self._loads[request.request_id] = Load(source["remote_address"], source["remote_name"], own, skip)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        made = Metadata(self._sends, self._loads)
        self._sends, self._loads = {}, {}
        return made

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._local_tokens.pop(request.request_id, None)
        # A prefill engine is asked for one token. Any other end has no reader.
        if not self._config.is_kv_producer or request.status.name != "FINISHED_LENGTH_CAPPED":
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        name = f"vllm/{secrets.token_hex(16)}"
        blocks = block_ids[: math.ceil(tokens / self._block_size)]
        self._sends[request.request_id] = Send(name, blocks, tokens)
        address = pathlib.Path(_option(self._config, "address_file")).read_text()
        source = {"remote_address": address, "remote_name": name, "remote_tokens": tokens}
        return True, {"do_remote_prefill": True, **source}

    # Worker

    @property
    def worker(self) -> "Worker":
        assert self._worker is not None, "a method of the worker was called in the scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """`kv_caches`: where the engine keeps its arrays. Their entries are replaced."""

        def replace(arrays: Sequence[jax.Array]) -> None:
            kv_caches.update(zip(kv_caches, arrays, strict=True))

        self.worker.register(lambda: list(kv_caches.values()), replace)

    def register_runner(self, runner: Any) -> None:
        """tpu-inference calls this instead: each step of its runner makes new arrays."""
        self.worker.register(lambda: runner.kv_caches, lambda arrays: setattr(runner, "kv_caches", arrays))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        for request, send in metadata.sends.items():
            self.worker.send(request, send)
        for request, load in metadata.loads.items():
            self.worker.load(request, load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs once all of its layers have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save yet: all layers are taken when the prompt has ended, since the model is one program."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: start_load_kv() has taken copies on the device."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self.worker.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_invalid_blocks()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


TPUConnector = JaxcommConnector  # tpu-inference accepts only the names of its own connectors


class Worker:
    """Transfers of the process that has the caches. One process has all devices of its engine.

    Args:
      config: vLLM's KVTransferConfig.
      block_size: tokens of a block.
    """

    def __init__(self, config: Any, block_size: int) -> None:
        self._config, self._block_size = config, block_size
        self._timeout_s = float(config.get_from_extra_config("timeout_s", 60.0))
        secret = pathlib.Path(_option(config, "secret_file")).read_text().strip()
        listen = config.get_from_extra_config("listen", None)
        self._endpoint = transfer.Endpoint(f"vllm-{config.engine_id}", secret=secret, listen=listen)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "jaxcomm-vllm")
        self._lock = threading.Lock()  # of the pool and of the offers
        self._offers: list[Offered] = []
        self._sent: set[str] = set()
        self._loads: dict[str, tuple[Load, concurrent.futures.Future[list[jax.Array]]]] = {}
        self._invalid: set[int] = set()

    def register(self, get: Callable[[], Sequence[jax.Array]], replace: Callable[[Sequence[jax.Array]], None]) -> None:
        """get, replace: the caches, one array per layer: (blocks, tokens, heads of keys and values.., elements)."""
        self._get, self._replace = get, replace
        cache = get()[0]
        if cache.ndim != 5 or cache.shape[1] != self._block_size or cache.shape[2] * cache.shape[3] % 2:
            raise ValueError(
                f"jaxcomm: caches must have shape (blocks, {self._block_size}, heads, 2, elements), or any split of "
                f"heads * 2 in which keys and values alternate, got {cache.shape}"
            )
        self._cache_shape, self._sharding = cache.shape, cache.sharding
        if isinstance(cache.sharding, NamedSharding):  # of some blocks
            self._sharding = NamedSharding(cache.sharding.mesh, P(None, *cache.sharding.spec[1:]))
        self._layout = transfer.PageLayout(
            layers=len(get()),
            heads=cache.shape[2] * cache.shape[3] // 2,
            dim=cache.shape[4],
            dtype=cache.dtype,
            page_tokens=self._block_size,
            order=("page", "token", "head", "kv", "dim"),
        )
        num_pages = int(self._config.get_from_extra_config("pool_pages", cache.shape[0]))
        self._pool = transfer.PagePool(self._endpoint, self._layout, num_pages)
        if self._config.is_kv_producer:
            file = pathlib.Path(_option(self._config, "address_file"))
            part = file.with_name(file.name + ".part")
            part.write_text(self._endpoint.address)
            part.replace(file)

    # Prefill

    def send(self, request: str, send: Send) -> None:
        """Takes a copy on the device, so that the blocks are free at once; a thread moves it to the host."""
        copies = _take(self._get(), self._padded(send.blocks))
        self._threads.submit(self._offer, send, copies, time.monotonic() + self._timeout_s)
        self._sent.add(request)

    def _offer(self, send: Send, copies: list[jax.Array], deadline: float) -> None:
        try:
            pages = self._allocate(len(send.blocks), deadline)
            lease_s = max(deadline - time.monotonic(), 0.0)
            offer = transfer.offer(self._pool, pages, tokens=send.tokens, lease_s=lease_s, streamed=True)
            offered = Offered(offer, send.name, pages)
            with self._lock:
                self._offers.append(offered)
            try:
                ticket = np.frombuffer(offer.ticket.encode(), np.uint8)
                transfer.publish(self._endpoint, send.name, {"ticket": ticket}, 0)
                for layer, copy in enumerate(copies):
                    host = np.asarray(copy)[: len(pages)]
                    self._pool.arrays[layer][pages] = host.reshape(self._layout.shape(len(pages)))
                    offer.mark_ready(layer)
            except BaseException:
                offer.revoke()
                raise
            finally:
                with self._lock:
                    offered.written = True
        except Exception:
            _LOG.exception("jaxcomm: the cache of a prompt could not be offered; the decode engine computes it again")

    # Decode

    def load(self, request: str, load: Load) -> None:
        self._loads[request] = load, self._threads.submit(self._pull, load, time.monotonic() + self._timeout_s)

    def _pull(self, load: Load, deadline: float) -> list[jax.Array]:
        """The pages of a load on the device, one array per layer, padded."""

        def left_s() -> float:
            return max(deadline - time.monotonic(), 0.0)

        writers = transfer.Group(load.address)
        next(transfer.watch(self._endpoint, writers, load.name, timeout_s=left_s()))
        wanted = {"ticket": None}
        ticket = transfer.fetch(self._endpoint, writers, load.name, 0, wanted, timeout_s=left_s()).result()["ticket"]
        with contextlib.ExitStack() as ends:
            pages = self._allocate(len(load.blocks), deadline)
            ends.callback(self._free, pages)
            skip = load.skip_tokens
            pull = transfer.pull(self._pool, bytes(ticket).decode(), pages, skip_tokens=skip, timeout_s=left_s())
            ends.callback(pull.cancel)
            arrived = []
            for layer in range(self._layout.layers):
                pull.wait(layer, timeout_s=left_s())
                if pages:
                    arrived.append(self._placed(self._pool.arrays[layer][pages]))
            return arrived

    def _placed(self, pages: np.ndarray) -> jax.Array:
        padded = np.zeros((len(self._padded(range(len(pages)))), *self._cache_shape[1:]), pages.dtype)
        padded[: len(pages)] = pages.reshape(len(pages), *self._cache_shape[1:])
        return jax.device_put(padded, self._sharding)

    # Both

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks are free, and those whose blocks have arrived or are invalid."""
        sent, self._sent = self._sent, set()
        received = set()
        for request, (load, future) in list(self._loads.items()):
            if not future.done():
                continue
            del self._loads[request]
            try:
                arrived = future.result()
                if load.blocks:
                    self._replace(_insert(list(self._get()), self._padded(load.blocks), arrived))
            except Exception as error:
                _LOG.warning("jaxcomm: request %s: %s", request, error)
                self._invalid.update(load.blocks)
            if load.blocks:
                received.add(request)
        with self._lock:
            self._free_ended()
        return sent, received

    def take_invalid_blocks(self) -> set[int]:
        taken, self._invalid = self._invalid, set()
        return taken

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._endpoint.close()

    def _allocate(self, count: int, deadline: float) -> list[int]:
        """Pages of the pool; waits for those of other requests."""
        while True:
            with self._lock:
                self._free_ended()
                if count <= self._pool.num_free or count > self._pool.num_pages or time.monotonic() > deadline:
                    return self._pool.allocate(count)
            time.sleep(_EVERY_S)

    def _free(self, pages: list[int]) -> None:
        with self._lock:
            self._pool.free(pages)

    def _free_ended(self) -> None:
        """Frees the pages of offers that have ended. The caller holds the lock."""
        for offered in [each for each in self._offers if each.written and each.offer.done]:
            self._offers.remove(offered)
            transfer.retire(self._endpoint, offered.name, 0)
            self._pool.free(offered.pages)

    def _padded(self, blocks: Sequence[int]) -> np.ndarray:
        """Numbers of blocks for programs, which are compiled once per power of two. The added ones are out of range."""
        size = 1 << (len(blocks) - 1).bit_length() if blocks else 0
        return np.array([*blocks, *[self._cache_shape[0]] * (size - len(blocks))], np.int32)


@jax.jit
def _take(caches: Sequence[jax.Array], blocks: jax.Array) -> list[jax.Array]:
    return [cache.at[blocks].get(mode="fill", fill_value=0) for cache in caches]


@functools.partial(jax.jit, donate_argnums=0)
def _insert(caches: Sequence[jax.Array], blocks: jax.Array, pages: Sequence[jax.Array]) -> list[jax.Array]:
    return [cache.at[blocks].set(of_layer, mode="drop") for cache, of_layer in zip(caches, pages, strict=True)]


def _option(config: Any, name: str) -> str:
    if not (value := config.get_from_extra_config(name, None)):
        raise ValueError(f"jaxcomm: kv_connector_extra_config must have {name!r}")
    return str(value)
