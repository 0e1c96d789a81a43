"""Tunix's weight synchronization over jaxcomm.transfer (README.md).

Tunix's coordinator drives rounds: the trainer prepares weights, the samplers stop, fetch into a second copy, swap, and
go on. Here the trainer publishes the weights of a round as a version, and each sampler fetches that version, with its
own shardings. Nothing is pushed, so Handler.transfer() has nothing to do, and a round has no unknown outcome.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tunix.experimental.orchestrator import weight_sync
from tunix.experimental.orchestrator.weight_sync_coordinator import WorkerRoundTracker

from jaxcomm import transfer

PyTree = Any


def _round(request: Any) -> int:
    """The number of a round. A round that is tried again has the same policy version, but a later number."""
    return int(request.extra_config["uuid"])


def _variables(tree: PyTree) -> tuple[weight_sync.TensorMetadata, ...]:
    """Names, global shapes and sizes of elements, which Tunix compares before it stops a sampler."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape = tuple(leaf.shape) or (1,)  # Tunix knows no scalars
        order = tuple(range(len(shape) - 1, -1, -1))
        size = jax.numpy.dtype(leaf.dtype).itemsize
        name = jax.tree_util.keystr(path)
        found.append(weight_sync.TensorMetadata(name, shape, (1,) * len(shape), order, size))
    return tuple(found)


class Source:
    """The trainer's part of a round: mix it into the worker that Tunix registers, or delegate to it.

    Args:
      endpoint: of this process of the trainer.
      get_params: the weights to publish, at the time of the round.
      object: the name of the published object; the same for all processes of the trainer.
    """

    def __init__(self, endpoint: transfer.Endpoint, get_params: Callable[[], PyTree], object: str = "weights") -> None:
        self._endpoint, self._get_params, self._object = endpoint, get_params, object
        self._lock = threading.Lock()

    async def prepare_weight_sync(
        self, sync_request: Any = None, **kwargs: Any
    ) -> Sequence[weight_sync.WorkUnitMetadata]:
        params = self._get_params()

        def publish() -> None:
            with self._lock:
                transfer.publish(self._endpoint, self._object, params, _round(sync_request), keep=2)

        await asyncio.to_thread(publish)
        unit = weight_sync.WorkUnitId(self._endpoint.name, str(jax.process_index()), self._object)
        return [weight_sync.WorkUnitMetadata(unit, shards=(self._endpoint.address,), variables=_variables(params))]

    async def release_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Ends the version. Samplers that still read it keep it until they have finished."""
        with self._lock:
            transfer.retire(self._endpoint, self._object, _round(sync_request))


class Destination:
    """A sampler's part of a round: mix it into the worker that Tunix registers, or delegate to it.

    Args:
      endpoint: of this sampler.
      params: the weights that it serves; those of a round have the same structure, shapes and types.
      quiesce: ends admission and waits for the running requests.
      resume: serves these weights from now on. It is called with the new ones, or with the old ones after a failure.
      timeout_s: limit of a fetch.
    """

    def __init__(
        self,
        endpoint: transfer.Endpoint,
        params: PyTree,
        quiesce: Callable[[], None],
        resume: Callable[[PyTree], None],
        timeout_s: float = 600.0,
    ) -> None:
        self._endpoint, self._quiesce, self._resume, self._timeout_s = endpoint, quiesce, resume, timeout_s
        self._serving, self._staged = params, None
        self._tracker, self._lock = WorkerRoundTracker(), threading.Lock()

    async def bind_weight_sync(self) -> None:
        """Nothing to bind: a sampler opens its connections when it fetches."""

    async def get_weight_sync_metadata(self) -> Sequence[weight_sync.WorkUnitMetadata]:
        unit = weight_sync.WorkUnitId(self._endpoint.name)
        return [weight_sync.WorkUnitMetadata(unit, variables=_variables(self._serving))]

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        await self._phase(sync_request, "prepared", self._quiesce)

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Fetches the weights of the round into a second copy."""

        def fetch() -> None:
            writers = transfer.Group(address for unit in sync_request.source_metadata for address in unit.shards)
            name = sync_request.source_metadata[0].unit.data_name
            shardings = jax.tree.map(lambda x: x.sharding, self._serving)
            version = _round(sync_request)
            future = transfer.fetch(self._endpoint, writers, name, version, shardings, timeout_s=self._timeout_s)
            self._staged = future.result()

        await self._phase(sync_request, "h2d_done", fetch)

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        def swap() -> None:
            if self._staged is not None:  # None: swapped before, but not recorded
                self._serving, self._staged = self._staged, None
            self._resume(self._serving)

        await self._phase(sync_request, "committed", swap)

    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        def go_back() -> None:
            self._staged = None
            self._resume(self._serving)

        await self._phase(sync_request, "aborted", go_back)

    async def get_weight_sync_status(self) -> dict[str, Any]:
        return self._tracker.report()

    async def _phase(self, request: Any, phase: str, work: Callable[[], None]) -> None:
        """Does the work of a phase unless the round has had it. Phases of one sampler never overlap."""

        def run() -> None:
            with self._lock:
                if self._tracker.admit(request, phase):
                    work()
                    self._tracker.complete(request, phase)

        await asyncio.to_thread(run)


class Handler(weight_sync.WeightSyncHandler):
    """The transport as Tunix's coordinator sees it."""

    def register_work_unit(self, metadata: weight_sync.WorkUnitMetadata) -> None:
        """Nothing to register: the request of a round brings the trainer's addresses to the samplers."""

    def transfer(
        self,
        src_units: Sequence[weight_sync.WorkUnitId],
        dst_units: Sequence[weight_sync.WorkUnitId],
        req_id: str | None = None,
        generation: int | None = None,
    ) -> weight_sync.TransferResult:
        """Succeeds: samplers read the weights in their next phase, weight_sync()."""
        return weight_sync.TransferResult(req_id or "", success=True)
