"""Plans of fetch(): what is read from which writer, and where it goes. They depend on manifests and shardings only."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxcomm._core import transfer as _native
from jaxcomm._typing import PyTree
from jaxcomm.transfer import _arrays, _errors
from jaxcomm.transfer._arrays import Box
from jaxcomm.transfer._endpoint import Group, describe

_PIECES_PER_READ = 1 << 14


@dataclasses.dataclass
class _Leaf:
    """One array of the object at a reader."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: list[tuple[int, int, Box]]  # writer, its array, box
    sharding: Sharding | None
    places: list[tuple[Any, int]] = dataclasses.field(default_factory=list)  # device, number of the array that it gets


@dataclasses.dataclass
class Plan:
    """The reads of one fetch.

    Attributes:
      digests: SHA-256 of the manifest of each writer. The plan holds for manifests with these digests.
      reads: for each writer, its reads: pieces there, and pieces of own arrays.
    """

    digests: list[bytes]
    reads: list[list[tuple[list[Any], list[Any]]]]
    _what: str
    _leaves: list[_Leaf]
    _structure: Any  # None: the result is a dict by path
    _arrays: list[tuple[list[int], np.dtype]]

    def allocate(self) -> list[np.ndarray]:
        try:
            return [_arrays.empty(shape, dtype) for shape, dtype in self._arrays]
        except MemoryError:
            size_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._arrays)
            raise _errors.Refused(
                f"jaxcomm.transfer: {self._what}: this host cannot allocate {size_bytes} bytes for its shards"
            ) from None

    def result(self, arrays: Sequence[np.ndarray]) -> PyTree:
        """The tree, once the own arrays have been read."""
        places = [place for leaf in self._leaves if leaf.sharding is not None for place in leaf.places]
        put = iter(jax.device_put([arrays[i] for _, i in places], [to for to, _ in places], may_alias=True))
        results: list[Any] = []
        for leaf in self._leaves:
            if leaf.sharding is None:
                results.append(arrays[leaf.places[0][1]])
            elif isinstance(leaf.sharding, SingleDeviceSharding):
                results.append(next(put))
            else:
                shards = [next(put) for _ in leaf.places]
                results.append(
                    jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards, dtype=leaf.dtype)
                )
        if self._structure is None:
            return {leaf.path: result for leaf, result in zip(self._leaves, results, strict=True)}
        return jax.tree.unflatten(self._structure, results)


def make_plan(group: Group, object: str, manifests: Sequence[bytes], shardings: PyTree) -> Plan:
    """Raises Refused if the manifests or the shardings do not fit."""
    leaves = _leaves(group, object, [json.loads(manifest) for manifest in manifests])
    targets, structure = _targets(object, shardings, [leaf.path for leaf in leaves])
    arrays: list[tuple[list[int], np.dtype]] = []
    from_writer: list[list[Any]] = [[] for _ in manifests]
    to_own: list[list[Any]] = [[] for _ in manifests]
    for leaf, target in zip(leaves, targets, strict=True):
        leaf.sharding = target
        wanted, own = _destinations(object, leaf)
        try:
            moves = _moves(tuple(box for _, _, box in leaf.sources), wanted)
        except ValueError as error:
            raise _errors.Refused(f"jaxcomm.transfer: fetch: {object!r}{leaf.path}: {error}") from None
        numbers = {i: len(arrays) + n for n, i in enumerate(own)}
        arrays += [([e - b for b, e in zip(*wanted[i], strict=True)], leaf.dtype) for i in own]
        leaf.places = _places(leaf, {wanted[i]: number for i, number in numbers.items()})
        for sender, i, *box in moves:
            if i not in numbers:
                continue
            writer, array, holder = leaf.sources[sender]
            from_writer[writer].append((array, *_arrays.inside(box, holder)))
            to_own[writer].append((numbers[i], *_arrays.inside(box, wanted[i])))
    reads = []
    for source, destination in zip(from_writer, to_own, strict=True):
        cuts = [slice(at, at + _PIECES_PER_READ) for at in range(0, len(source), _PIECES_PER_READ)]
        reads.append([(source[cut], destination[cut]) for cut in cuts])
    what = f"fetch: {object!r} of {describe(group.addresses[0])}"
    return Plan([hashlib.sha256(m).digest() for m in manifests], reads, what, leaves, structure, arrays)


def _places(leaf: _Leaf, numbers: dict[Box, int]) -> list[tuple[Any, int]]:
    if leaf.sharding is None or isinstance(leaf.sharding, SingleDeviceSharding):
        return [(leaf.sharding, number) for number in numbers.values()]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return [(device, numbers[box_of(index, leaf.shape)]) for device, index in indices.items()]


def _leaves(group: Group, object: str, manifests: Sequence[Any]) -> list[_Leaf]:
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


def is_target(x: Any) -> bool:
    return x is None or isinstance(x, Sharding)


def _targets(object: str, shardings: PyTree, paths: Sequence[str]) -> tuple[list[Any], Any]:
    """The sharding of each array, and the structure of the result; None: a dict by path."""
    if is_target(shardings):
        return [shardings] * len(paths), None
    with_paths, structure = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=is_target)
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
        return (box_of((slice(None),) * len(leaf.shape), leaf.shape),), [0]
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
        wanted[device.process_index, box_of(indices[device], leaf.shape)] = None
    own = [i for i, (process, _) in enumerate(wanted) if process == jax.process_index()]
    return tuple(box for _, box in wanted), own


def box_of(index: Any, shape: Sequence[int]) -> Box:
    intervals = [s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True)]
    return tuple(begin for begin, _ in intervals), tuple(end for _, end in intervals)


@functools.lru_cache(maxsize=4096)
def _moves(sources: tuple[Box, ...], destinations: tuple[Box, ...]) -> list[tuple[int, int, Any, Any]]:
    # The planner needs a dimension. Scalars get one of size 1 in front, as all others do.
    def widened(boxes: tuple[Box, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((0, *begin), (1, *end)) for begin, end in boxes]

    found = _native.moves(widened(sources), widened(destinations))
    return [(source, to, begin[1:], end[1:]) for source, to, begin, end in found]
