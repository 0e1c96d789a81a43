"""integrations/sglang_jax against a stand-in of sglang-jax's manager; its check.py runs with the real one."""

import importlib
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm import transfer

SECRET = "secret of the tests"
SHAPE = (4, 6)


class Manager:
    """Starts a pull at once, from the host and port that the bootstrap server knows."""

    def __init__(self, wrapper, zmq_notifier, **options):
        self.wrapper, self.options = wrapper, options

    def prefill_transport_metadata(self, dp_rank):
        return {"engine": self.engine_name}

    def try_start_decode(self, context):
        peer = context.peer_info
        where = f"{peer['host']}:{peer['transfer_port']}"
        return self.wrapper.pull(context.transfer_id, context.spec_factory(), remote_addr=where)


@pytest.fixture
def managers(monkeypatch):
    package = "sgl_jax.srt.disaggregation"
    names = ["sgl_jax", "sgl_jax.srt", package, f"{package}.base", f"{package}.jax_transfer"]
    modules = {
        name: types.ModuleType(name) for name in (*names, f"{package}.base.transfer", f"{package}.jax_transfer.conn")
    }
    modules[f"{package}.base.transfer"].DecodeAdmission = object
    modules[f"{package}.base.transfer"].DecodeTransferContext = object
    modules[f"{package}.jax_transfer.conn"].JaxTransferKVManager = Manager
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delitem(sys.modules, "integrations.sglang_jax.transfer_backend", raising=False)
    backend = importlib.import_module("integrations.sglang_jax.transfer_backend")
    with transfer.Endpoint("prefill", secret=SECRET) as one, transfer.Endpoint("decode", secret=SECRET) as other:
        yield [backend.KVManager(endpoint, None, pull_timeout_seconds=20.0) for endpoint in (one, other)]


def decode(managers, transfer_id, dtype):
    prefill, reader = managers
    sharding = NamedSharding(Mesh(np.array(jax.devices()[4:7]), ("x",)), P(None, "x"))
    peer = {"host": "h", "transfer_port": 1, "transport_metadata": prefill.prefill_transport_metadata()}
    spec = {"kv": jax.ShapeDtypeStruct(SHAPE, dtype, sharding=sharding)}
    return reader.try_start_decode(
        types.SimpleNamespace(peer_info=peer, transfer_id=transfer_id, spec_factory=lambda: spec)
    )


def test_caches_arrive_in_another_sharding_until_they_are_released(managers):
    values = np.arange(24, dtype=np.float32).reshape(SHAPE)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    wrapper = managers[0].wrapper
    wrapper.register_pull("first", {"kv": jax.device_put(values, sharding)})
    wrapper.register_pull("second", {"kv": jax.device_put(-values, sharding)})
    assert managers[0].prefill_transport_metadata()["engine"] == "jaxcomm"
    for transfer_id, want in (("first", values), ("second", -values)):
        got = decode(managers, transfer_id, np.float32)["kv"]
        np.testing.assert_array_equal(got, want)
        assert got.sharding.spec == P(None, "x")
    with pytest.raises(ValueError, match=r"float32\(4, 6\), expected int32\(4, 6\)"):
        decode(managers, "first", np.int32)
    wrapper.release("first")
    with pytest.raises(transfer.VersionGone, match="'first' version 0 of endpoint 'prefill'"):
        decode(managers, "first", np.float32)
    np.testing.assert_array_equal(decode(managers, "second", np.float32)["kv"], -values)
    with pytest.raises(transfer.NotFound):
        decode(managers, "third", np.float32)
