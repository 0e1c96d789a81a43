"""Plans of fetch(): what is read from which writer, and where it goes. They depend on manifests and shardings only."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxcomm import _compat
from jaxcomm._core import transfer as _native
from jaxcomm._typing import PyTree
from jaxcomm.transfer import _arrays, _errors
from jaxcomm.transfer._arrays import Box
from jaxcomm.transfer._endpoint import Group, describe

_PIECES_PER_READ = 1 << 14

# The boxes of a read: of arrays of the writer, and of own arrays, in the same order.
Pieces = tuple[list[Any], list[Any]]


@dataclasses.dataclass
class _Leaf:
    """One array of the object at a reader."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: list[tuple[int, int, Box]]  # writer, its array, box
    sharding: Sharding | None
    numbers: dict[Box, int] = dataclasses.field(default_factory=dict)  # of the own arrays
    made: Any = None  # of an earlier result: its type, and the own array of each device


@dataclasses.dataclass
class Plan:
    """The reads of one fetch.

    Attributes:
      digests: SHA-256 of the manifest of each writer; empty for those that are lost. The plan holds for manifests with
        these digests.
      reads: for each writer, its reads.
    """

    digests: list[bytes]
    reads: list[list[Pieces]]
    _what: str
    _leaves: list[_Leaf]
    _structure: Any  # None: the result is a dict by path
    _arrays: list[tuple[_Leaf, Box]]  # the own ones: a box of a leaf each

    @functools.cached_property
    def size_bytes(self) -> int:
        return sum(math.prod(_sizes(box)) * leaf.dtype.itemsize for leaf, box in self._arrays)

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether no other process has a part of the result."""
        return all(leaf.sharding is None or leaf.sharding.is_fully_addressable for leaf in self._leaves)

    def allocate(self) -> list[np.ndarray]:
        try:
            return [_arrays.empty(_sizes(box), leaf.dtype) for leaf, box in self._arrays]
        except MemoryError:
            raise _errors.Refused(
                f"jaxcomm.transfer: {self._what}: this host cannot allocate {self.size_bytes} bytes for its shards"
            ) from None

    def rest(
        self, pieces: Pieces, received_bytes: int, living: Collection[int], lost: _errors.PeerLost
    ) -> list[tuple[int, Pieces]]:
        """What a read of a lost writer has not received, as reads of living ones, or raises `lost`."""
        wanted: dict[int, list[Box]] = {}  # by own array
        for number, begin, end in pieces[1]:
            leaf, own = self._arrays[number]
            size_bytes = math.prod(_sizes((begin, end))) * leaf.dtype.itemsize
            received = min(received_bytes, size_bytes)
            received_bytes -= received
            rest = _after((begin, end), received // leaf.dtype.itemsize)
            wanted.setdefault(number, []).extend(_shifted(box, own[0], 1) for box in rest)
        found: dict[int, Pieces] = {}
        for number, boxes in wanted.items():
            leaf, own = self._arrays[number]
            sources = [source for source in leaf.sources if source[0] in living]
            try:
                moves = _moves(tuple(box for _, _, box in sources), tuple(boxes))
            except ValueError:
                raise lost from None
            for sender, _, *box in moves:
                writer, array, holder = sources[sender]
                there, here = found.setdefault(writer, ([], []))
                there.append((array, *_shifted(box, holder[0], -1)))
                here.append((number, *_shifted(box, own[0], -1)))
        return [(writer, part) for writer, whole in found.items() for part in _parts(whole)]

    def result(self, arrays: Sequence[np.ndarray]) -> PyTree:
        """The tree, once the own arrays have been read."""
        results = [_result(leaf, arrays) for leaf in self._leaves]
        if self._structure is None:
            return {leaf.path: result for leaf, result in zip(self._leaves, results, strict=True)}
        return jax.tree.unflatten(self._structure, results)


def _result(leaf: _Leaf, arrays: Sequence[np.ndarray]) -> Any:
    if leaf.sharding is None:
        return arrays[next(iter(leaf.numbers.values()))]
    if not leaf.numbers:  # no device of this process
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)
    if leaf.made is not None:
        aval, numbers = leaf.made
        return _compat.put_shards(aval, leaf.sharding, [arrays[i] for i in numbers.values()], list(numbers))
    # Takes a tenth of the time of device_put, and copies aligned memory as little.
    result = jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: arrays[leaf.numbers[box_of(index, leaf.shape)]]
    )
    if leaf.dtype.itemsize <= 4:  # the type of others depends on jax_enable_x64
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        leaf.made = result.aval, {d: leaf.numbers[box_of(index, leaf.shape)] for d, index in indices.items()}
    return result


def make_plan(
    group: Group,
    object: str,
    manifests: Mapping[int, bytes],
    shardings: PyTree,
    lost: _errors.PeerLost | None = None,
) -> Plan:
    """The plan for the manifests of the writers that live.

    Raises Refused if the manifests or the shardings do not fit; `lost` if the writers that live do not have all data.
    """
    leaves = _leaves(group, object, {writer: json.loads(manifest) for writer, manifest in manifests.items()})
    targets, structure = _targets(object, shardings, [leaf.path for leaf in leaves])
    arrays: list[tuple[_Leaf, Box]] = []
    pieces: list[Pieces] = [([], []) for _ in group.addresses]
    for leaf, target in zip(leaves, targets, strict=True):
        leaf.sharding = target
        wanted, own = _destinations(object, leaf)
        try:
            moves = _moves(tuple(box for _, _, box in leaf.sources), wanted)
        except ValueError as error:
            raise lost or _errors.Refused(f"jaxcomm.transfer: fetch: {object!r}{leaf.path}: {error}") from None
        numbers = {i: len(arrays) + n for n, i in enumerate(own)}
        arrays += [(leaf, wanted[i]) for i in own]
        leaf.numbers = {wanted[i]: number for i, number in numbers.items()}
        for sender, i, *box in moves:
            if i not in numbers:
                continue
            writer, array, holder = leaf.sources[sender]
            pieces[writer][0].append((array, *_shifted(box, holder[0], -1)))
            pieces[writer][1].append((numbers[i], *_shifted(box, wanted[i][0], -1)))
    digests = [hashlib.sha256(manifests[i]).digest() if i in manifests else b"" for i in range(len(pieces))]
    what = f"fetch: {object!r} of {describe(group.addresses[0])}"
    return Plan(digests, [_parts(whole) for whole in pieces], what, leaves, structure, arrays)


def _parts(pieces: Pieces) -> list[Pieces]:
    """A read of any number of pieces, as reads."""
    cuts = [slice(at, at + _PIECES_PER_READ) for at in range(0, len(pieces[0]), _PIECES_PER_READ)]
    return [(pieces[0][cut], pieces[1][cut]) for cut in cuts]


def _leaves(group: Group, object: str, manifests: Mapping[int, Any]) -> list[_Leaf]:
    leaves: list[_Leaf] = []
    first = min(manifests)
    for writer, manifest in sorted(manifests.items()):
        if manifest["digest"] != manifests[first]["digest"]:
            raise _errors.Refused(
                f"jaxcomm.transfer: fetch: {object!r} has other arrays at {describe(group.addresses[writer])} than at "
                f"{describe(group.addresses[first])}"
            )
        for i, entry in enumerate(manifest["leaves"]):
            if writer == first:
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


def _sizes(box: Box) -> list[int]:
    return [end - begin for begin, end in zip(*box, strict=True)]


def _shifted(box: Sequence[Sequence[int]], origin: Sequence[int], sign: int) -> Box:
    """A box of the array as a box of the part at `origin` (sign -1), or the reverse (1)."""
    begin, end = (tuple(x + sign * o for x, o in zip(side, origin, strict=True)) for side in box)
    return begin, end


def _after(box: Box, count: int) -> list[Box]:
    """The elements of a box in row-major order, without the first `count`, as boxes."""
    begin, end = box
    sizes = _sizes(box)
    if count == math.prod(sizes):
        return []
    boxes = []
    at = [int(i) for i in np.unravel_index(count, sizes)] if sizes else []
    for d in reversed(range(len(at))):
        first = at[d] + (d < len(at) - 1)  # the row of a later dimension has its rest already
        if first < sizes[d]:
            here = [b + i for b, i in zip(begin[:d], at[:d], strict=True)]
            boxes.append(((*here, begin[d] + first, *begin[d + 1 :]), (*(i + 1 for i in here), *end[d:])))
    return boxes if sizes else [box]


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
