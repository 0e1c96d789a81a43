"""Rounds of Tunix's own coordinator over weight_sync.py.

    git clone https://github.com/google/tunix && PYTHONPATH=tunix python -m integrations.tunix.check

A trainer on a mesh of 2 x 2 devices and two samplers on 3 and 1 devices, in one process.
"""

import asyncio
import secrets
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.experimental.common import datatypes
from tunix.experimental.orchestrator import weight_sync_coordinator, worker_registry

from integrations.tunix.weight_sync import Destination, Handler, Source
from jaxcomm import transfer

RoundState = weight_sync_coordinator.RoundState
SHAPES = {"up": (6, 12), "down": (12, 6), "scale": ()}


def values(version: int) -> dict[str, np.ndarray]:
    return {
        name: version * 100 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }


def placed(version: int, mesh: Mesh) -> dict[str, jax.Array]:
    spec = P(*mesh.axis_names)
    return {
        name: jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P())) for name, x in values(version).items()
    }


class Trainer(Source):
    def __init__(self, endpoint: transfer.Endpoint, mesh: Mesh) -> None:
        self.params = placed(0, mesh)
        super().__init__(endpoint, lambda: self.params)

    def info(self) -> Any:
        return datatypes.WorkerInfo(worker_id="trainer", roles=frozenset({"trainer"}))


class Sampler(Destination):
    def __init__(self, endpoint: transfer.Endpoint, mesh: Mesh) -> None:
        self.served, self.admits, self.name = placed(0, mesh), True, endpoint.name
        super().__init__(endpoint, self.served, self.stop, self.serve, timeout_s=10)

    def info(self) -> Any:
        return datatypes.WorkerInfo(worker_id=self.name, roles=frozenset({"rollout"}))

    def stop(self) -> None:
        self.admits = False

    def serve(self, params: dict[str, jax.Array]) -> None:
        self.served, self.admits = params, True


def assert_serve(samplers: list[Sampler], version: int) -> None:
    for sampler in samplers:
        assert sampler.admits, f"{sampler.name} does not serve"
        for name, want in values(version).items():
            np.testing.assert_array_equal(sampler.served[name], want, err_msg=f"{sampler.name} {name}")


async def rounds(trainer: Trainer, samplers: list[Sampler], mesh: Mesh) -> None:
    registry = worker_registry.WorkerRegistry()
    for worker in (trainer, *samplers):
        registry.register(worker)
    coordinator = weight_sync_coordinator.WeightSyncCoordinator(registry, Handler())

    for version in (1, 2):
        trainer.params = placed(version, mesh)
        result = await coordinator.sync(policy_version=version)
        assert result.state == RoundState.COMMITTED, result
        assert_serve(samplers, version)
    print("two rounds: committed, both samplers have the trainer's weights")

    trainer.params = placed(3, mesh)
    fetch = samplers[1].weight_sync

    async def after_the_end(request: Any) -> None:
        await trainer.release_weight_sync(request)  # the version goes before this sampler has read it
        await fetch(request)

    samplers[1].weight_sync = after_the_end  # type: ignore[method-assign]
    try:
        await coordinator.sync(policy_version=3)
        raise AssertionError("a round without weights has committed")
    except weight_sync_coordinator.WeightSyncError as error:
        assert error.result.state == RoundState.ABORTED, error.result
        assert any("VersionGone" in failure for failure in error.result.failures), error.result.failures
    assert_serve(samplers, 2)
    print("a version that ended too early: aborted, both samplers serve the old weights")

    del samplers[1].weight_sync
    result = await coordinator.sync(policy_version=3)
    assert result.state == RoundState.COMMITTED, result
    assert_serve(samplers, 3)
    print("the same version again: committed")

    trainer.params = {**placed(4, mesh), "up": placed(4, mesh)["down"]}
    try:
        await coordinator.sync(policy_version=4)
        raise AssertionError("a round with other shapes has committed")
    except weight_sync_coordinator.WeightSyncError as error:
        assert "global shape differs" in str(error.result.failures), error.result.failures
    assert_serve(samplers, 3)
    print("other shapes: refused before a sampler stops")


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    devices, secret = np.array(jax.devices()), secrets.token_hex(16)
    meshes = [Mesh(devices[:4].reshape(2, 2), ("x", "y")), Mesh(devices[4:7], ("x",)), Mesh(devices[7:], ("x",))]
    endpoints = [transfer.Endpoint(name, secret=secret) for name in ("trainer", "sampler-0", "sampler-1")]
    try:
        samplers = [Sampler(endpoint, mesh) for endpoint, mesh in zip(endpoints[1:], meshes[1:], strict=True)]
        asyncio.run(rounds(Trainer(endpoints[0], meshes[0]), samplers, meshes[0]))
    finally:
        for endpoint in endpoints:
            endpoint.close()


if __name__ == "__main__":
    main()
