"""publish() and fetch(): pytrees with versions, between jobs with other meshes."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxcomm._core import transfer as _native
from jaxcomm._processes import kv_store
from jaxcomm._typing import PyTree
from jaxcomm.transfer import _arrays, _errors
from jaxcomm.transfer._arrays import Box
from jaxcomm.transfer._endpoint import Endpoint, Group, Lease, _key_of, describe

_LATEST = -1
_PIECES_PER_READ = 1 << 14


def publish(
    endpoint: Endpoint, object: str, tree: PyTree, version: int, *, snapshot: bool = False, keep: int = 1
) -> None:
    """Shows a pytree of arrays to other jobs, as one version of an object.

    Every process of the job calls publish() with its endpoint. Readers see the version once all endpoints of the group
    that they name have it.

    The arrays are not copied: the endpoint keeps them until the version is retired and its last lease has ended. A
    program that is given such an array to donate copies it instead.

    Args:
      endpoint: that of this process.
      object: the name of the object.
      tree: pytree of jax.Array or numpy.ndarray.
      version: later than every version before.
      snapshot: copy the arrays to memory of the host first.
      keep: versions that stay, this one included. Older ones are retired.

    Raises:
      ValueError: version or keep is not valid, or an element type cannot be sent.
    """
    if version < 0 or keep < 1:
        raise ValueError(f"publish: version must be at least 0 and keep at least 1, got {version} and {keep}")
    arrays: list[np.ndarray] = []
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        if not isinstance(leaf, jax.Array | np.ndarray) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(f"publish: {object!r}{name} must be an array with an element type of data, got {leaf!r}")
        shards = []
        for box, data in _shards(leaf).items():
            shards.append([*box, len(arrays)])
            host = np.asarray(data)  # on CPUs, the memory of the shard
            arrays.append(np.array(host) if snapshot else host)
        leaves.append({"path": name, "shape": leaf.shape, "dtype": str(leaf.dtype), "shards": shards})
    types = [(leaf["path"], leaf["shape"], leaf["dtype"]) for leaf in leaves]
    manifest = {"leaves": leaves, "digest": hashlib.sha256(json.dumps(types).encode()).hexdigest()}

    def expose() -> tuple[int, str, int]:
        arguments = [_arrays.argument(x) for x in arrays]
        text = json.dumps(manifest).encode()
        return endpoint._native.expose(_key_of(object), version, text, arguments, True)

    number = endpoint._keep(expose, f"publish: {object!r} of endpoint {endpoint.name!r}", arrays)
    versions = endpoint._versions.setdefault(object, [])
    versions.append((version, number))
    for old, _ in versions[:-keep]:
        retire(endpoint, object, old)


def retire(endpoint: Endpoint, object: str, version: int, *, revoke: bool = False) -> None:
    """Takes a version back: nobody can open it any more. Does nothing if that has happened before.

    Args:
      endpoint: that of this process.
      object: the name of the object.
      version: one that this endpoint has published.
      revoke: end the leases of readers too, whose fetches then fail with Revoked. Otherwise they go on, and the arrays
        stay until they have ended.
    """
    versions = endpoint._versions.get(object, [])
    for each in [v for v in versions if v[0] == version]:
        endpoint._native.withdraw(each[1], revoke)
        versions.remove(each)
    endpoint._collect()


def fetch(
    endpoint: Endpoint,
    group: Group,
    object: str,
    version: int | str,
    shardings: PyTree,
    *,
    timeout_s: float = 60.0,
) -> "concurrent.futures.Future[PyTree]":
    """Starts to read one version of an object that another job has published.

    Only the elements of this process's shards are read, each once, from the writers that hold them. The result has all
    arrays in one version, or the future has an exception.

    Args:
      endpoint: that of this process.
      group: the endpoints of the writers.
      object: the name that they publish.
      version: a number, or "latest": the newest one that all of them have. If the shardings span several processes, all
        of them call fetch() in the same order, and their first process chooses.
      shardings: pytree with the structure of the published one, or one sharding for all arrays. A leaf is a
        jax.sharding.Sharding, or None for a numpy.ndarray. With one sharding, the result is a dict by path.
      timeout_s: limit of the whole fetch.

    Returns:
      A future of the pytree.

    Raises, when the result of the future is asked for:
      NotFound: no such object or version.
      VersionGone: the version was retired.
      Revoked: a writer took it back during the fetch.
      PeerLost: a writer died, left or does not know the secret.
      TransferTimeout: a writer lives but did not answer in time.
      Refused: the trees differ, or a sharding does not fit.
    """
    if version != "latest" and not (isinstance(version, int) and version >= 0):
        raise ValueError(f"fetch: version must be a number or 'latest', got {version!r}")
    several = any(not s.is_fully_addressable for s in _sharding_leaves(shardings) if isinstance(s, Sharding))
    number = 0
    if several:
        number = endpoint._fetches.get(object, 0)
        endpoint._fetches[object] = number + 1
    run = functools.partial(_run, endpoint, group, object, version, shardings, timeout_s, (several, number))
    return endpoint._threads.submit(run)


def watch(
    endpoint: Endpoint, group: Group, object: str, *, after: int = -1, timeout_s: float | None = None
) -> Iterator[int]:
    """Versions of an object that all endpoints of the group have, each later than the one before.

    Versions that are replaced while the caller works may be left out.

    Args:
      endpoint: that of this process.
      group: the writers.
      object: the name that they publish.
      after: only versions later than this one.
      timeout_s: limit of the wait for each version; None means no limit.

    Raises:
      TransferTimeout: no later version within timeout_s.
      PeerLost: a writer died.
    """
    while True:
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        versions = []
        for address in group.addresses:
            peer = endpoint._peer(address)
            call = endpoint._native.watch(peer, _key_of(object), after)
            left_s = max(deadline - time.monotonic(), 0.0)
            endpoint._check(endpoint._native.wait(call, left_s), f"{object!r} of {describe(address)}", address, peer)
            versions.append(call.version)
        after = min(versions)
        yield after


def _run(
    endpoint: Endpoint,
    group: Group,
    object: str,
    version: int | str,
    shardings: PyTree,
    timeout_s: float,
    shared: tuple[bool, int],
) -> PyTree:
    deadline = time.monotonic() + timeout_s
    several, number = shared
    key = f"transfer/{object}/{number}"
    wanted = version if isinstance(version, int) else _LATEST
    follows = several and wanted == _LATEST and jax.process_index() > 0
    if follows:
        wanted = int(kv_store.kv_get(key, timeout_s, f"fetch of {object!r}: process 0 did not choose a version"))
    leases = _open_all(endpoint, group, object, wanted, deadline)
    try:
        if several and wanted == _LATEST:
            kv_store.kv_set(key, str(leases[0].version), timeout_s)
        return _read_all(group, object, shardings, leases, deadline)
    finally:
        for lease in leases:
            lease.close()


def _open_all(endpoint: Endpoint, group: Group, object: str, version: int, deadline: float) -> list[Lease]:
    """Leases of one version at all writers: the given one, or the newest that all of them have."""
    while True:
        opened: list[Lease] = []

        def open_at(address: str, exact: int, opened: list[Lease] = opened) -> Lease:
            left_s = max(deadline - time.monotonic(), 0.0)
            opened.append(endpoint._open(address, _key_of(object), exact, f"fetch: {object!r}", left_s))
            return opened[-1]

        try:
            leases = [open_at(address, version) for address in group.addresses]
            oldest = min(lease.version for lease in leases)
            for i, lease in enumerate(leases):
                if lease.version != oldest:
                    leases[i] = open_at(group.addresses[i], oldest)
                    lease.close()
            return leases
        except BaseException as error:
            for lease in opened:
                lease.close()
            # A writer has retired the version that another one has not replaced yet.
            gone = version == _LATEST and isinstance(error, _errors.VersionGone)
            if not gone or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@dataclasses.dataclass
class _Leaf:
    """One array of the object at a reader."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: list[tuple[int, int, Box]]  # writer, its array, box
    sharding: Sharding | None
    parts: dict[Box, np.ndarray] = dataclasses.field(default_factory=dict)


def _read_all(group: Group, object: str, shardings: PyTree, leases: Sequence[Lease], deadline: float) -> PyTree:
    leaves = _leaves(group, object, leases)
    targets, structure = _targets(object, shardings, [leaf.path for leaf in leaves])
    arrays: list[np.ndarray] = []
    from_writer: list[list[Any]] = [[] for _ in leases]
    to_own: list[list[Any]] = [[] for _ in leases]
    for leaf, target in zip(leaves, targets, strict=True):
        leaf.sharding = target
        wanted, own = _destinations(object, leaf)
        try:
            moves = _moves(tuple(box for _, _, box in leaf.sources), wanted)
        except ValueError as error:
            raise _errors.Refused(f"jaxcomm.transfer: fetch: {object!r}{leaf.path}: {error}") from None
        for i in own:
            begin, end = wanted[i]
            shape = [e - b for b, e in zip(begin, end, strict=True)]
            leaf.parts[wanted[i]] = _arrays.empty(shape, leaf.dtype)
        numbers = {i: len(arrays) + n for n, i in enumerate(own)}
        arrays.extend(leaf.parts[wanted[i]] for i in own)
        for sender, i, *box in moves:
            if i not in numbers:
                continue
            writer, array, holder = leaf.sources[sender]
            from_writer[writer].append((array, *_arrays.inside(box, holder)))
            to_own[writer].append((numbers[i], *_arrays.inside(box, wanted[i])))
    arguments = [_arrays.argument(x) for x in arrays]
    reads = []
    try:
        for lease, source, destination in zip(leases, from_writer, to_own, strict=True):
            for at in range(0, len(source), _PIECES_PER_READ):
                some = slice(at, at + _PIECES_PER_READ)
                reads.append((lease, lease.read(source[some], destination[some], arguments)))
        for lease, read in reads:
            lease.wait(read, max(deadline - time.monotonic(), 0.0))
    except BaseException:
        for lease, read in reads:
            lease.cancel(read)  # the memory of the arrays ends with this frame
        raise
    results = [_assemble(leaf) for leaf in leaves]
    if structure is None:
        return {leaf.path: result for leaf, result in zip(leaves, results, strict=True)}
    return jax.tree.unflatten(structure, results)


def _leaves(group: Group, object: str, leases: Sequence[Lease]) -> list[_Leaf]:
    manifests = [json.loads(lease.manifest) for lease in leases]
    leaves: list[_Leaf] = []
    for writer, manifest in enumerate(manifests):
        if manifest["digest"] != manifests[0]["digest"]:
            raise _errors.Refused(
                f"jaxcomm.transfer: fetch: {object!r} has other arrays at {describe(group.addresses[writer])} than at "
                f"{describe(group.addresses[0])}"
            )
        for i, entry in enumerate(manifest["leaves"]):
            if writer == 0:
                leaves.append(_Leaf(entry["path"], tuple(entry["shape"]), _dtype(entry["dtype"]), [], None))
            for begin, end, array in entry["shards"]:
                leaves[i].sources.append((writer, array, (tuple(begin), tuple(end))))
    return leaves


def _dtype(name: str) -> np.dtype:
    return np.dtype(jax.numpy.dtype(name))


def _sharding_leaves(shardings: PyTree) -> list[Any]:
    return jax.tree.leaves(shardings, is_leaf=_is_target)


def _is_target(x: Any) -> bool:
    return x is None or isinstance(x, Sharding)


def _targets(object: str, shardings: PyTree, paths: Sequence[str]) -> tuple[list[Any], Any]:
    """The sharding of each array, and the structure of the result; None: a dict by path."""
    if _is_target(shardings):
        return [shardings] * len(paths), None
    with_paths, structure = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=_is_target)
    given = [jax.tree_util.keystr(path) for path, _ in with_paths]
    if given != list(paths):
        missing, unknown = set(paths) - set(given), set(given) - set(paths)
        raise _errors.Refused(
            f"jaxcomm.transfer: fetch: shardings must have the structure of {object!r}: "
            f"missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}"
        )
    return [target for _, target in with_paths], structure


def _destinations(object: str, leaf: _Leaf) -> tuple[tuple[Box, ...], list[int]]:
    """The boxes that all processes of the readers need, and the numbers of those of this process."""
    if leaf.sharding is None:
        return (_box((slice(None),) * len(leaf.shape), leaf.shape),), [0]
    try:
        leaf.sharding.shard_shape(leaf.shape)
        indices = leaf.sharding.devices_indices_map(leaf.shape)
    except (ValueError, IndexError) as error:
        raise _errors.Refused(
            f"jaxcomm.transfer: fetch: the sharding of {object!r}{leaf.path} does not fit shape {leaf.shape}: {error}"
        ) from None
    # Devices of one process share what it has read.
    wanted: dict[tuple[int, Box], None] = {}
    devices: list[Any] = list(indices)  # jax.Device, whose attributes type checkers do not see
    for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
        wanted[device.process_index, _box(indices[device], leaf.shape)] = None
    own = [i for i, (process, _) in enumerate(wanted) if process == jax.process_index()]
    return tuple(box for _, box in wanted), own


def _box(index: Any, shape: Sequence[int]) -> Box:
    intervals = [s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True)]
    return tuple(begin for begin, _ in intervals), tuple(end for _, end in intervals)


def _shards(leaf: Any) -> dict[Box, Any]:
    """Data of the shards of this process, replicas once."""
    if isinstance(leaf, np.ndarray):
        return {_box((slice(None),) * leaf.ndim, leaf.shape): np.ascontiguousarray(leaf).reshape(leaf.shape)}
    return {_box(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


@functools.lru_cache(maxsize=4096)
def _moves(sources: tuple[Box, ...], destinations: tuple[Box, ...]) -> list[tuple[int, int, Any, Any]]:
    # The planner needs a dimension. Scalars get one of size 1 in front, as all others do.
    def widened(boxes: tuple[Box, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((0, *begin), (1, *end)) for begin, end in boxes]

    found = _native.moves(widened(sources), widened(destinations))
    return [(source, to, begin[1:], end[1:]) for source, to, begin, end in found]


def _assemble(leaf: _Leaf) -> Any:
    if leaf.sharding is None:
        (part,) = leaf.parts.values()
        return part
    shards = [
        jax.device_put(leaf.parts[_box(index, leaf.shape)], device, may_alias=True)
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards, dtype=leaf.dtype)
