"""A toy engine that calls a connector in vLLM's order. check.py and the tests run it; it computes no text.

The cache of a token depends on the token, its position and the layer alone, so NumPy can say what every block holds.
"""

import dataclasses
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, HEADS, DIM = 3, 4, 2
LIMIT_S = 60.0


@dataclasses.dataclass
class Config:
    """What a connector reads of vLLM's configuration."""

    kv_role: str
    block_size: int
    extra: dict[str, Any]
    engine_id: str = "engine"

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.extra.get(key, default)

    @property
    def of_vllm(self) -> Any:
        return types.SimpleNamespace(
            kv_transfer_config=self, cache_config=types.SimpleNamespace(block_size=self.block_size)
        )


def cache_of(tokens: Sequence[int], layer: int, begin: int = 0) -> np.ndarray:
    """(tokens, heads, keys and values, elements) of the tokens from `begin` on."""
    positions = np.arange(begin, len(tokens))
    each = np.array(tokens[begin:]) * 1000 + positions * 10 + layer
    last = np.arange(HEADS * 2 * DIM).reshape(HEADS, 2, DIM)
    return (each[:, None, None, None] * 16 + last).astype(np.float32)


class Engine:
    """Scheduler and worker with one request at a time.

    Args:
      connector: the class; roles: vLLM's KVConnectorRole.
      config: see Config.
      num_blocks: of the cache.
      sharding: of each layer's cache.
    """

    def __init__(
        self, connector: Callable[..., Any], roles: Any, config: Config, num_blocks: int, sharding: Any
    ) -> None:
        self._size = config.block_size
        shape = (num_blocks, self._size, HEADS, 2, DIM)
        self.caches = {f"layer.{i}": jax.device_put(jnp.zeros(shape), sharding) for i in range(LAYERS)}
        self.scheduler = connector(config.of_vllm, roles.SCHEDULER, None)
        self.worker = connector(config.of_vllm, roles.WORKER, None)
        self.worker.register_kv_caches(self.caches)
        self.free = list(range(num_blocks))
        self._finished: set[str] = set()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def blocks(self, blocks: Sequence[int], tokens: int) -> list[np.ndarray]:
        """What the cache of each layer holds for the first tokens of these blocks."""
        arrays = [np.asarray(cache)[list(blocks)] for cache in self.caches.values()]
        return [array.reshape(-1, HEADS, 2, DIM)[:tokens] for array in arrays]

    def request(self, request_id: str, tokens: Sequence[int], params: dict[str, Any] | None = None) -> Any:
        return types.SimpleNamespace(
            request_id=request_id,
            prompt=tokens,
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            kv_transfer_params=params,
            status=types.SimpleNamespace(name="RUNNING"),
            blocks=[],
        )

    def allocate(self, request: Any) -> None:
        wanted = -(-request.num_prompt_tokens // self._size) - len(request.blocks)
        # Blocks do not lie in a row, and their order differs between engines.
        request.blocks += [self.free.pop(len(self.free) // 2) for _ in range(wanted)]

    def step(self, run: Any = None) -> tuple[set[str], set[str], set[int]]:
        """One step: a prompt runs from its first token that has no cache, or nothing runs."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        if run is not None:
            self._compute(run, run.num_prompt_tokens)
        self.worker.start_load_kv(None)  # as vLLM 0.33 does when no request loads in its own step
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(self._finished)
        invalid = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        self._finished = set()
        return sent, received, invalid

    def _compute(self, request: Any, end: int) -> None:
        """The forward pass: tokens up to `end` that have no cache."""
        begin, request.num_computed_tokens = request.num_computed_tokens, end
        at = np.arange(begin, end)
        blocks, offsets = np.array(request.blocks)[at // self._size], at % self._size
        for layer, name in enumerate(self.caches):
            self.worker.wait_for_layer_load(name)
            values = cache_of(request.prompt[:end], layer, begin)
            self.caches[name] = self.caches[name].at[blocks, offsets].set(values)
            self.worker.save_kv_layer(name, self.caches[name], None)

    def prefill(self, request: Any) -> dict[str, Any]:
        """Runs a prompt for one token. Returns what the decode engine gets; the blocks are free again."""
        self.allocate(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, blocks_of(request), 0)
        self.step(request)
        request.status.name = "FINISHED_LENGTH_CAPPED"
        delays, params = self.scheduler.request_finished(request, request.blocks)
        assert delays
        self._finished = {request.request_id}
        self.until(lambda: request.request_id in self.step()[0])
        self.free += request.blocks
        return dict(params)

    def load(self, request: Any, local_tokens: int = 0) -> tuple[int, set[int]]:
        """Loads what another engine has computed, and computes the rest.

        `local_tokens`: those that are in the first blocks. Returns the loaded tokens and the invalid blocks.
        """
        self.allocate(request)
        self._compute(request, local_tokens)
        count, asynchronous = matched = self.scheduler.get_num_new_matched_tokens(request, local_tokens)
        assert matched == self.scheduler.get_num_new_matched_tokens(request, local_tokens)
        self.scheduler.update_state_after_alloc(request, blocks_of(request), count)
        invalid: set[int] = set()
        if asynchronous:

            def arrived() -> bool:
                _, received, failed = self.step()
                invalid.update(failed)
                return request.request_id in received

            self.until(arrived)
            if not invalid:
                request.num_computed_tokens += count
            self.scheduler.update_state_after_alloc(request, blocks_of(request), 0)
        loaded = request.num_computed_tokens - local_tokens
        self.step(request)
        return loaded, invalid

    def until(self, ended: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ended():
            assert time.monotonic() < deadline, f"a transfer did not end within {LIMIT_S} s"
            time.sleep(0.002)


def blocks_of(request: Any) -> Any:
    return types.SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
