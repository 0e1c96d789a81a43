"""integrations/vllm against a stand-in of vLLM's interface; its check.py runs with the real one, in two processes."""

import abc
import enum
import importlib
import sys
import threading
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

INTERFACE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Interface:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


ABSTRACT = (
    "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_num_new_matched_tokens",
    "update_state_after_alloc", "build_connector_meta",
)  # fmt: skip
Base = abc.ABCMeta("Base", (Interface,), {name: abc.abstractmethod(lambda self: None) for name in ABSTRACT})


@pytest.fixture
def vllm(monkeypatch):
    parts = INTERFACE.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    base = types.ModuleType(INTERFACE)
    base.KVConnectorBase_V1, base.KVConnectorMetadata, base.KVConnectorRole = Base, object, Role
    monkeypatch.setitem(sys.modules, INTERFACE, base)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delitem(sys.modules, "integrations.vllm.connector", raising=False)
    connector = importlib.import_module("integrations.vllm.connector")
    return types.SimpleNamespace(connector=connector, toy=importlib.import_module("integrations.vllm.engine"))


@pytest.fixture
def engines(vllm, tmp_path):
    """Makes an engine of a role; all are closed in the end."""
    (tmp_path / "secret").write_text("secret of the tests")
    made = []

    def make(role, block_size, devices, **options):
        files = {"secret_file": tmp_path / "secret", "address_file": tmp_path / "address"}
        config = vllm.toy.Config(role, block_size, files | options, role)
        sharding = NamedSharding(Mesh(np.array(devices), ("model",)), P(None, None, "model"))
        made.append(vllm.toy.Engine(vllm.connector.JaxcommConnector, Role, config, 24, sharding))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def load(vllm, engine, name, prompt, params, local_tokens=0):
    """Loaded tokens and number of invalid blocks. Whatever was loaded, the cache is right in the end."""
    request = engine.request(name, prompt, params)
    loaded, invalid = engine.load(request, local_tokens)
    assert invalid in (set(), set(request.blocks)) and not engine.worker.get_block_ids_with_load_errors()
    for layer, got in enumerate(engine.blocks(request.blocks, len(prompt))):
        np.testing.assert_array_equal(got, vllm.toy.cache_of(prompt, layer), err_msg=f"{name} layer {layer}")
    engine.free += request.blocks
    return loaded, len(invalid)


def test_decode_loads_what_prefill_has_computed(vllm, engines):
    """Other block sizes and devices. The pool of the prefill engine has pages for one long prompt only."""
    prefill = engines("kv_producer", 4, jax.devices()[:4], pool_pages=8, listen="127.0.0.2:0")
    decode = engines("kv_consumer", 8, jax.devices()[4:6])
    prompts = {"a": list(range(3, 32)), "b": list(range(40, 69)), "c": [5, 4, 3]}
    params = {"a": prefill.prefill(prefill.request("a", prompts["a"]))}
    assert params["a"]["remote_address"].startswith("tcp://127.0.0.2:")
    prefill.until(lambda: prefill.worker.worker._pool.num_free == 0)
    params["b"] = prefill.prefill(prefill.request("b", prompts["b"]))  # waits for the pages of the first one
    assert load(vllm, decode, "a", prompts["a"], params["a"]) == (29, 0)
    prefill.step()  # frees them
    assert all(cache.addressable_shards[1].index[2] == slice(2, 4) for cache in decode.caches.values())
    assert load(vllm, decode, "b", prompts["b"], params["b"], local_tokens=16) == (13, 0)
    params["c"] = prefill.prefill(prefill.request("c", prompts["c"]))
    assert load(vllm, decode, "c", prompts["c"], params["c"]) == (3, 0)
    assert (decode.worker.worker._pool.num_free, len(decode.free), len(prefill.free)) == (24, 24, 24)


def test_what_is_offered_when_a_request_ends(vllm, engines):
    producer, consumer = engines("kv_producer", 4, jax.devices()[:1]), engines("kv_consumer", 4, jax.devices()[:1])
    capped, stopped = "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"
    ends = (producer, capped, 8, 8), (producer, capped, 11, 10), (producer, stopped, 10, 0), (consumer, capped, 10, 0)
    for engine, status, computed, tokens in ends:
        request = engine.request("a", list(range(10)))
        request.num_computed_tokens, request.status.name = computed, status
        offers, params = engine.scheduler.request_finished(request, [5, 6, 7, 8])
        assert (offers, params and params["remote_tokens"]) == (tokens > 0, tokens or None)
        for want in ([([5, 6, 7][: -(-tokens // 4)], tokens)] if tokens else [], []):  # once
            sends = engine.scheduler.build_connector_meta(None).sends.values()
            assert [(send.blocks, send.tokens) for send in sends] == want


def test_what_is_here_before_is_not_loaded(vllm, engines):
    """The offer ends all the same, long before its lease."""
    prefill = engines("kv_producer", 4, jax.devices()[:1])
    decode = engines("kv_consumer", 8, jax.devices()[1:2])
    prompt = list(range(16))
    params = prefill.prefill(prefill.request("a", prompt))
    assert load(vllm, decode, "a", prompt, params, local_tokens=16) == (0, 0)

    def have_ended():
        prefill.step()
        decode.step()
        return prefill.worker.worker._pool.num_free == 24 and not decode.worker.worker._loads

    prefill.until(have_ended)


@pytest.mark.parametrize("fault", ["source ended", "other layers", "more tokens than the prompt"])
def test_failed_loads_are_computed_again(vllm, engines, fault, monkeypatch):
    prefill = engines("kv_producer", 4, jax.devices()[:1])
    if fault == "other layers":
        monkeypatch.setattr(vllm.toy, "LAYERS", 2)
    decode = engines("kv_consumer", 8, jax.devices()[1:2])
    prompt = list(range(10))
    params = prefill.prefill(prefill.request("a", prompt))
    if fault == "source ended":
        prefill.close()
    asked = prompt[:9] if fault == "more tokens than the prompt" else prompt
    assert load(vllm, decode, "a", asked, params) == (0, 0 if asked is not prompt else 2)
    assert decode.worker.worker._pool.num_free == 24


def test_pages_are_not_used_again_while_a_thread_writes_them(vllm, engines, monkeypatch):
    prefill = engines("kv_producer", 4, jax.devices()[:1])
    writes, goes_on = threading.Event(), threading.Event()

    def mark_ready(offer, layer):
        offer.revoke()
        writes.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(vllm.connector.transfer.Offer, "mark_ready", mark_ready)
    prefill.prefill(prefill.request("a", list(range(16))))
    assert writes.wait(60)
    pool = prefill.worker.worker._pool
    try:
        prefill.step()
        assert pool.num_free == 20
    finally:
        goes_on.set()
    prefill.until(lambda: prefill.step() and pool.num_free == 24)


def test_bad_configurations_are_refused(vllm, engines, tmp_path):
    for role, options, error in (
        ("kv_both", {}, "kv_role must be kv_producer or kv_consumer"),
        ("kv_consumer", {"secret_file": None}, "must have 'secret_file'"),
        ("kv_producer", {"address_file": ""}, "must have 'address_file'"),
    ):
        with pytest.raises(ValueError, match=error):
            engines(role, 4, jax.devices()[:1], **options)
