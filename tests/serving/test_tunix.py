"""integrations/tunix against a stand-in of Tunix's interface; its check.py runs with the real one."""

import asyncio
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
ORDER = ["prepared", "h2d_done", "committed", "aborted"]


class Tracker:
    """Work of a phase runs once per round, and again if it has failed."""

    def __init__(self):
        self.round, self.phase = 0, ""

    def admit(self, request, phase):
        number = request.extra_config["uuid"]
        if number > self.round:
            self.round, self.phase = number, ""
        return not self.phase or ORDER.index(phase) > ORDER.index(self.phase)

    def complete(self, request, phase):
        self.phase = phase

    def report(self):
        return {"uuid": self.round, "phase": self.phase}


@pytest.fixture
def integration(monkeypatch):
    def record(*fields, **defaults):
        def construct(*given, **named):
            return types.SimpleNamespace(**defaults | dict(zip(fields, given, strict=False)) | named)

        return construct

    for name in ("tunix", "tunix.experimental", "tunix.experimental.orchestrator"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    interface = types.ModuleType("weight_sync")
    interface.WorkUnitId = record("job_name", "job_replica_id", "data_name")
    interface.TensorMetadata = record("name", "shape", "mesh_shape", "layout", "item_size")
    interface.WorkUnitMetadata = record("unit", variables=())
    interface.TransferResult = record("req_id")
    interface.WeightSyncHandler = object
    coordinator = types.ModuleType("weight_sync_coordinator")
    coordinator.WorkerRoundTracker = Tracker
    sys.modules["tunix.experimental.orchestrator"].weight_sync = interface
    monkeypatch.setitem(sys.modules, "tunix.experimental.orchestrator.weight_sync", interface)
    monkeypatch.setitem(sys.modules, "tunix.experimental.orchestrator.weight_sync_coordinator", coordinator)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delitem(sys.modules, "integrations.tunix.weight_sync", raising=False)
    return importlib.import_module("integrations.tunix.weight_sync")


def placed(version, devices):
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    return {
        "up": jax.device_put(version * 100 + np.arange(24, dtype=np.float32).reshape(12, 2), sharding),
        "scale": jax.numpy.float32(version),
    }


def request_of(number, metadata=()):
    return types.SimpleNamespace(extra_config={"uuid": number}, source_metadata=metadata)


class Sampler:
    """A sampler whose resume() fails the given number of times."""

    def __init__(self, integration, endpoint, failures=0):
        self.events, self.failures = [], failures
        params = placed(0, jax.devices()[4:7])
        self.worker = integration.Destination(endpoint, params, lambda: self.events.append("stops"), self.resume)

    def resume(self, params):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory for caches")
        self.events.append(("serves", int(params["scale"]), np.asarray(params["up"]).tolist()))


def served(version):
    return ("serves", version, np.asarray(placed(version, jax.devices()[:1])["up"]).tolist())


@pytest.fixture
def endpoints():
    with transfer.Endpoint("trainer", secret=SECRET) as trainer, transfer.Endpoint("sampler", secret=SECRET) as sampler:
        yield trainer, sampler


def test_a_round_swaps_once(integration, endpoints):
    params = placed(1, jax.devices()[:4])
    source = integration.Source(endpoints[0], lambda: params)
    sampler = Sampler(integration, endpoints[1], failures=1)

    async def run():
        metadata = await source.prepare_weight_sync(request_of(1))
        await source.prepare_weight_sync(request_of(2))  # the version before stays
        offered = [tuple(vars(each).values()) for each in metadata[0].variables]
        assert offered == [("['scale']", (1,), (1,), (0,), 4), ("['up']", (12, 2), (1, 1), (1, 0), 4)]
        request, worker = request_of(1, metadata), sampler.worker
        await worker.pre_weight_sync(request)
        await worker.weight_sync(request)
        assert sampler.events == ["stops"]  # the new weights are not served yet
        with pytest.raises(RuntimeError, match="no memory"):
            await worker.post_weight_sync(request)
        assert (await worker.get_weight_sync_status())["phase"] == "h2d_done"
        for _ in range(2):
            await worker.post_weight_sync(request)
        await source.release_weight_sync(request)

    asyncio.run(run())
    assert sampler.events == ["stops", served(1)]


def test_an_aborted_round_serves_the_old_weights(integration, endpoints):
    params = placed(1, jax.devices()[:4])
    source = integration.Source(endpoints[0], lambda: params)
    sampler = Sampler(integration, endpoints[1])

    async def run():
        first = request_of(1, await source.prepare_weight_sync(request_of(1)))
        await sampler.worker.pre_weight_sync(first)
        await source.release_weight_sync(first)
        with pytest.raises(transfer.VersionGone):
            await sampler.worker.weight_sync(first)
        second = request_of(2, await source.prepare_weight_sync(request_of(2)))
        for request in (first, second):
            await sampler.worker.pre_weight_sync(request)
            if request is second:
                await sampler.worker.weight_sync(request)
            await sampler.worker.abort_weight_sync(request)
        third = request_of(3, await source.prepare_weight_sync(request_of(3)))
        await sampler.worker.pre_weight_sync(third)
        await sampler.worker.post_weight_sync(third)  # nothing of the second round is left

    asyncio.run(run())
    stays = ["stops", served(0)]
    assert sampler.events == stays * 3
