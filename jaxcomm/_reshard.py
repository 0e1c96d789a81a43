"""reshard(): arrays from any sharding to any other, with the fewest bytes."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxcomm import _check, _lowering
from jaxcomm._config import LONGEST_S, config
from jaxcomm._core import plan
from jaxcomm._dtypes import in_bytes
from jaxcomm._lowering import Call
from jaxcomm._typing import PyTree
from jaxcomm.ops._shards import Side
from jaxcomm.ops.reshard_in import reshard_p

_AXIS = "rank"  # of the mesh over all devices of a call
_SILENT_S = 2  # before the progress bar appears

_Device: TypeAlias = Any  # jax.Device, whose attributes type checkers do not see
# For each device of a call and each dimension, the begin and the end of its shard.
Boxes = tuple[int, ...]


def reshard(
    tree: PyTree,
    shardings: PyTree,
    *,
    donate: bool = False,
    algorithm: str | None = None,
    max_bytes: int | None = None,
    timeout_s: float | None = None,
) -> PyTree:
    """Moves arrays to other shardings; each device receives only the elements that it lacks, and each of them once.

    The meshes of source and destination may differ in shape, in the order of devices and in size. They may overlap or
    have no device in common, and belong to one process or to several. All processes with a device of a source or a
    destination call reshard() in the same order and with equal arguments.

    An array whose shards stay on their devices keeps its buffers. See docs/guide/reshard.md.

    Args:
      tree: pytree of arrays. A process that has no shard of a source may pass a jax.ShapeDtypeStruct with its sharding.
      shardings: a sharding, or a pytree of shardings; a sharding stands for all arrays of a subtree. In place of a
        sharding of one array, a jax.ShapeDtypeStruct with a sharding also gives its shape, which is checked, and its
        new element type. Arrays are sent in the smaller of the two types.
      donate: delete the source arrays as soon as they have been moved. The call then waits for the transfers. As with
        jax.device_put, an array whose shards stay is not deleted: the result has its buffers.
      algorithm: a name from ``algorithms("reshard")``, or "xla", the default on platforms other than CPUs: then
        jax.device_put moves the arrays, or jax.lax.ppermute if old and new devices differ and several processes have
        them.
      max_bytes: limit on the bytes that a device receives at once. Arrays are moved in groups, one after the other; a
        group has at least one array. None means all at once.
      timeout_s: limit of the wait for other processes; None means JAXCOMM_TIMEOUT_S, which also limits the wait for a
        process that has not yet connected. An error where XLA moves arrays between processes.

    Returns:
      Arrays of the same shapes and values, with the given shardings and element types.

    Raises:
      ValueError: the trees differ, a sharding does not fit its array, devices of several platforms, an array is donated
        twice, or an invalid option. Nothing has been moved.
      TypeError: a leaf is no array, or has no element type that can be sent.
      RuntimeError: a process did not connect.
      jax.errors.JaxRuntimeError: a rank died or did not arrive in time, or calls of processes differ (when an array is
        used). The source arrays are intact, except those that were donated and have been moved.

    Cost: each device receives the elements of its new shard that it did not have.
    """
    op = "reshard"
    _check.algorithm(op, op, algorithm)
    if max_bytes is not None:
        max_bytes = _check.positive(op, "max_bytes", max_bytes)
    if timeout_s is not None:
        timeout_s = _check.number(op, "timeout_s", timeout_s, 1e-3, LONGEST_S)
    paths, leaves, targets, structure = _pair(tree, shardings)
    moves = [_Move.of(*each) for each in zip(paths, leaves, targets, strict=True)]
    if timeout_s is not None:
        _check_limit(paths, moves, algorithm)
    with _numbered((move.devices for move in moves), timeout_s) as number_of:
        # Processes may differ in the checks of their own arrays. They have counted the call by then.
        for path, leaf in zip(paths, leaves, strict=True):
            _check_own(path, leaf)
        if donate:
            _check_donated(paths, leaves)
        timeout_ms = 0 if timeout_s is None else round(timeout_s * 1e3)
        moved = _run(paths, leaves, moves, number_of, donate, algorithm, max_bytes, timeout_ms)
    return jax.tree.unflatten(structure, moved)


def _run(
    paths: Sequence[str],
    leaves: Sequence[Any],
    moves: Sequence["_Move"],
    number_of: dict[tuple[int, ...], int],
    donate: bool,
    algorithm: str | None,
    max_bytes: int | None,
    timeout_ms: int,
) -> list[Any]:
    results: list[Any] = [None] * len(leaves)
    groups: dict[tuple[_Device, ...], list[int]] = {}  # arrays with the same devices move in one program
    for i, move in enumerate(moves):
        if move.in_place:
            results[i] = _without_program(leaves[i], move)
        elif _why_xla(move.devices[0].platform, algorithm) and not _needs_program(leaves[i], move):
            results[i] = _by_jax(leaves[i], move, donate)
        else:
            _check_memory(paths[i], leaves[i], move)
            groups.setdefault(move.devices, []).append(i)
    wait = donate or max_bytes is not None
    buckets = [(d, bucket) for d, members in groups.items() for bucket in _buckets(members, moves, max_bytes)]
    with _progress(sum(moves[i].size_bytes for _, bucket in buckets for i in bucket), wait) as advance:
        for position, (devices, bucket) in enumerate(buckets):
            by = "xla" if _why_xla(devices[0].platform, algorithm) else algorithm
            run = _program(devices, tuple(moves[i].key for i in bucket), by, timeout_ms)
            numbers = np.array([number_of[_processes(devices)], position], np.uint32)
            moved = run(numbers, [leaves[i] for i in bucket], [moves[i] for i in bucket], wait)
            for i, array in zip(bucket, moved, strict=True):
                results[i] = array
                if donate and isinstance(leaves[i], jax.Array):
                    leaves[i].delete()
                advance(moves[i].size_bytes)
    return results


@contextlib.contextmanager
def _progress(size_bytes: int, waits: bool) -> Iterator[Callable[[int], Any]]:
    """A bar on the terminal of the first process, for a call that waits for seconds. Needs tqdm."""
    if not waits or importlib.util.find_spec("tqdm") is None:
        yield lambda num_bytes: None
        return
    from tqdm import tqdm

    options = {"unit": "B", "unit_scale": True, "delay": _SILENT_S}
    off = None if jax.process_index() == 0 else True  # None: if standard error is no terminal
    with tqdm(total=size_bytes, desc="reshard", disable=off, **options) as bar:
        yield bar.update


def _by_jax(leaf: Any, move: "_Move", donate: bool) -> jax.Array:
    """A donated array is deleted unless the result has some of its buffers.

    On CPUs, jax.device_put must not donate: jax 0.10 crashes if shards of the same shape go to other devices.
    """
    x = leaf if leaf.dtype == move.dtype else jax.jit(jnp.astype, static_argnums=1)(leaf, move.dtype)
    may_donate = move.devices[0].platform != "cpu"
    moved = jax.device_put(x, move.target, donate=may_donate and (donate or x is not leaf))
    if donate and not leaf.is_deleted():
        jax.block_until_ready(moved)
        if not _buffers(leaf) & _buffers(moved):
            leaf.delete()
    return moved


def _buffers(array: jax.Array) -> set[tuple[_Device, int]]:
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards}


def _pair(tree: PyTree, shardings: PyTree) -> tuple[list[str], list[Any], list[Any], Any]:
    """Names of the leaves, leaves, their targets, and the structure of the tree."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)

    def is_target(x: Any) -> bool:
        return isinstance(x, Sharding | jax.ShapeDtypeStruct)

    try:
        spread = jax.tree.map(lambda s, part: jax.tree.map(lambda _: s, part), shardings, tree, is_leaf=is_target)
    except (ValueError, TypeError) as error:
        raise ValueError(f"reshard: shardings must have the structure of tree, or of its top: {error}") from None
    targets = jax.tree.leaves(spread, is_leaf=is_target)
    return [jax.tree_util.keystr(path) or "x" for path, _ in with_paths], [x for _, x in with_paths], targets, structure


# The turn of a thread, and the numbers of the calls, by the processes of their devices.
_calls: dict[tuple[int, ...], tuple[threading.Lock, Iterator[int]]] = {}


def _processes(devices: Iterable[_Device]) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in devices}))


@contextlib.contextmanager
def _numbered(calls: Iterable[Sequence[_Device]], timeout_s: float | None) -> Iterator[dict[tuple[int, ...], int]]:
    """The number of this call of reshard() among those of each set of processes: the same in all of them.

    A call has its number whether it succeeds or fails, so calls after an error meet again. XLA's run ids part if an
    error keeps one process from executing a program.

    Threads take turns. A process in a later call is otherwise taken for one that lacks the earlier one, if another
    thread still compiles that.
    """
    with contextlib.ExitStack() as turns:
        numbers, late = {}, []
        limit_s = config().timeout_s if timeout_s is None else timeout_s
        for processes in sorted({_processes(devices) for devices in calls}):
            turn, count = _calls.setdefault(processes, (threading.Lock(), itertools.count(1)))
            if len(processes) > 1 and turn.acquire(timeout=limit_s):
                turns.callback(turn.release)
            elif len(processes) > 1:
                late.append(processes)
            numbers[processes] = next(count)
        if late:
            raise jax.errors.JaxRuntimeError(
                f"reshard: another thread's call, on processes {late[0]}, has not ended within {limit_s:g} s"
            )
        yield numbers


def _check_own(path: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"reshard: {path} has been deleted or donated")
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.addressable_devices:
        raise ValueError(f"reshard: {path} must be a jax.Array: its sharding has devices of this process")


def _check_donated(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    seen: dict[int, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, jax.Array):
            continue  # one jax.ShapeDtypeStruct may stand for several arrays of other processes
        if id(leaf) in seen:
            raise ValueError(f"reshard: {seen[id(leaf)]} and {path} are the same array, which can't be donated twice")
        seen[id(leaf)] = path


def _check_limit(paths: Sequence[str], moves: Sequence["_Move"], algorithm: str | None) -> None:
    for path, move in zip(paths, moves, strict=True):
        reason = _why_xla(move.devices[0].platform, algorithm)
        if reason and len(_processes(move.devices)) > 1 and not move.in_place:
            raise ValueError(f"reshard: timeout_s does not limit XLA's collectives, which move {path} ({reason})")


def _check_memory(path: str, leaf: Any, move: "_Move") -> None:
    default = jax.local_devices(backend=move.devices[0].platform)[0].default_memory().kind
    for kind in (leaf.sharding.memory_kind, move.target.memory_kind):
        if kind not in (None, default):
            raise ValueError(f"reshard: {path} can't move from or to memory {kind!r} (jax.device_put can)")


def _needs_program(leaf: Any, move: "_Move") -> bool:
    """Whether jax.device_put may refuse the move: between processes, it takes equal sets of devices."""
    return len(_processes(move.devices)) > 1 and leaf.sharding.device_set != move.target.device_set


@functools.cache
def _why_xla(platform: str, algorithm: str | None) -> str:
    """Why XLA's own collectives or copies move all arrays on a platform; empty if jaxcomm does."""
    if platform == "cpu":
        return _lowering.why_xla(platform, algorithm)
    platform = {"gpu": "cuda"}.get(platform, "other")
    able = _lowering.capabilities(platform, algorithm)
    return str(plan.resolve("reshard", {"algorithm": algorithm or ""}, "float32", 0, 0, plan.Placement(), able).reason)


@dataclasses.dataclass(frozen=True)
class _Move:
    """One array and its new sharding.

    Attributes:
      target: the new sharding.
      devices: those of source and destination, by process.
      key: what the program depends on: shapes of a shard at source and destination, dtypes of both, boxes of both.
      shape, dtype: of the new array.
      in_place: whether each device has its new shard already.
    """

    target: Sharding
    devices: tuple[_Device, ...]
    key: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    in_place: bool

    @classmethod
    def of(cls, path: str, leaf: Any, target: Any) -> "_Move":
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"reshard: {path} is traced; inside jit, use jaxcomm.reshard_in")
        source = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or not isinstance(source, Sharding):
            raise TypeError(
                f"reshard: {path} must be a jax.Array, or a jax.ShapeDtypeStruct with a sharding, got {leaf!r}"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"reshard: {path} has element type {leaf.dtype}; pass its data (jax.random.key_data)")
        dtype = leaf.dtype
        if isinstance(target, jax.ShapeDtypeStruct):
            if target.shape != leaf.shape:
                raise ValueError(f"reshard: {path} has shape {leaf.shape}, but its target has shape {target.shape}")
            dtype, target = jax.dtypes.canonicalize_dtype(target.dtype), target.sharding
            if np.dtype(leaf.dtype).kind == "c" != np.dtype(dtype).kind:
                raise TypeError(
                    f"reshard: {path} can't change from {leaf.dtype} to {dtype}, which has no imaginary part"
                )
        if not isinstance(target, Sharding):
            raise TypeError(
                f"reshard: the new sharding of {path} must be a jax.sharding.Sharding, or a jax.ShapeDtypeStruct with "
                f"one, got {target!r}"
            )
        boxes = []
        for what, sharding in (("source", source), ("new sharding", target)):
            try:
                sharding.shard_shape(leaf.shape)
                boxes.append(_boxes(sharding, leaf.shape))
            except (ValueError, IndexError) as error:
                raise ValueError(f"reshard: the {what} of {path} does not fit shape {leaf.shape}: {error}") from None
        used: set[Any] = source.device_set | target.device_set
        devices = tuple(sorted(used, key=lambda d: (d.process_index, d.id)))
        platforms = {device.platform for device in devices}
        if len(platforms) > 1:
            raise ValueError(f"reshard: {path} can't move between devices of {' and '.join(sorted(platforms))}")
        if foreign := set(devices) - set(jax.devices(devices[0].platform)):
            raise ValueError(f"reshard: {path} has devices that are not in jax.devices(): {sorted(map(str, foreign))}")
        held, wanted = boxes
        key = (
            source.shard_shape(leaf.shape),
            target.shard_shape(leaf.shape),
            leaf.dtype,
            dtype,
            *(_numbers(of_devices, devices, len(leaf.shape)) for of_devices in boxes),
        )
        stays = all(held.get(device) == box for device, box in wanted.items())
        stays = leaf.size == 0 or (stays and leaf.dtype == dtype)
        return cls(target, devices, key, leaf.shape, dtype, stays and source.memory_kind == target.memory_kind)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def received_bytes(self) -> int:
        """Bytes of the new shard of a device."""
        return math.prod(self.key[1]) * np.dtype(self.dtype).itemsize


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[_Device, tuple[tuple[int, int], ...]]:
    indices = sharding.devices_indices_map(shape)
    return {d: tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True)) for d, index in indices.items()}


def _numbers(boxes: dict[_Device, tuple[tuple[int, int], ...]], devices: Sequence[_Device], ndim: int) -> Boxes:
    """Boxes of all devices. A dimension in front tells which devices have one: scalars have no other."""
    return tuple(
        number
        for device in devices
        for interval in (((0, 1), *boxes[device]) if device in boxes else ((0, 0),) * (ndim + 1))
        for number in interval
    )


def _without_program(leaf: Any, move: _Move) -> jax.Array:
    """The array in buffers that its devices have."""
    own: list[Any] = list(move.target.addressable_devices_indices_map(move.shape))
    if math.prod(move.shape) == 0:
        shards = [jax.device_put(np.zeros(move.key[1], move.dtype), device) for device in own]
    else:
        by_device = _shards(leaf)
        shards = [by_device[device] for device in own]
    return jax.make_array_from_single_device_arrays(move.shape, move.target, shards, dtype=move.dtype)


def _shards(leaf: Any) -> dict[_Device, jax.Array]:
    return {s.device: s.data for s in leaf.addressable_shards} if isinstance(leaf, jax.Array) else {}


def _buckets(members: Sequence[int], moves: Sequence[_Move], max_bytes: int | None) -> list[list[int]]:
    buckets: list[list[int]] = []
    size = 0
    for i in members:
        size += moves[i].received_bytes
        if not buckets or (max_bytes is not None and size > max_bytes):
            buckets.append([])
            size = moves[i].received_bytes
        buckets[-1].append(i)
    return buckets


@functools.lru_cache(maxsize=1024)
def _program(
    devices: tuple[_Device, ...], keys: tuple[tuple, ...], algorithm: str | None, timeout_ms: int
) -> Callable[[np.ndarray, Sequence[Any], Sequence[_Move], bool], list[jax.Array]]:
    """One program over all devices; it moves an array per key. Devices without a shard pass one that nobody reads."""
    mesh = Mesh(np.array(devices), (_AXIS,))
    along = NamedSharding(mesh, P(_AXIS))
    own = [device for device in devices if device.process_index == jax.process_index()]
    # All processes name the same place, wherever they call: they are identified by it.
    call = Call("reshard", (_AXIS,), None, algorithm, None, "jaxcomm.reshard")

    def body(numbers, *xs):
        moved = []
        for x, (_, to, _, dtype, held, wanted) in zip(xs, keys, strict=True):
            sent = x.astype(min(x.dtype, dtype, key=jax.dtypes.itemsize_bits))  # the old type if they are equal
            received = reshard_p.bind(
                sent,
                numbers,
                call=call,
                sources=held,
                destinations=wanted,
                result=to or (1,),
                over=(),
                onto_zeros=False,  # nobody reads the arrays of devices without a shard
                timeout_ms=timeout_ms,
                numbered=True,
            )
            moved.append(received.astype(dtype))
        return moved

    def joined(shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array whose block on each device has this shape."""
        first, *others = shape or (1,)
        return (len(devices) * first, *others)

    # The numbers are on every device.
    in_specs = (P(), *(P(_AXIS) for _ in keys))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P(_AXIS), check_vma=False))

    def run(numbers: np.ndarray, leaves: Sequence[Any], moves: Sequence[_Move], wait: bool) -> list[jax.Array]:
        operands = []
        for leaf, (shape, _, dtype, *_) in zip(leaves, keys, strict=True):
            shards = _shards(leaf)
            unused = np.zeros(shape or (1,), dtype) if len(shards) < len(own) else None
            blocks = [shards[d] if d in shards else jax.device_put(unused, d) for d in own]
            blocks = [block if block.ndim else block.reshape(1) for block in blocks]
            operands.append(jax.make_array_from_single_device_arrays(joined(shape), along, blocks, dtype=dtype))
        # A process without a device has no part in the transfer.
        outputs: Sequence[Any] = [None] * len(keys)
        if own:
            with jax.set_mesh(mesh):  # the caller's may be another one
                outputs = program(numbers, *operands)
        if wait:  # also in a process without a new shard
            jax.block_until_ready(outputs)
        results: list[jax.Array] = []
        for output, move in zip(outputs, moves, strict=True):
            wanted = set(move.target.device_set)
            blocks = [s.data for s in output.addressable_shards if s.device in wanted] if own else []
            blocks = blocks if move.shape else [block.reshape(()) for block in blocks]
            results.append(jax.make_array_from_single_device_arrays(move.shape, move.target, blocks, dtype=move.dtype))
        return results

    return run


def call_of(op: str, x: Any, num_ranks: Any, shardings: Any) -> tuple[dict[str, Any], str, tuple[int, int]]:
    """As _request.call_of, of the global array x between two shardings over devices, or over `num_ranks` ranks."""
    if not isinstance(shardings, tuple | list) or len(shardings) != 2:
        raise ValueError(f"{op}: shardings must be the old and the new one, got {shardings!r}")
    shape, ndim = tuple(x.shape), len(x.shape)
    if all(isinstance(side, Sharding) for side in shardings):
        used: set[Any] = shardings[0].device_set | shardings[1].device_set
        devices = sorted(used, key=lambda d: (d.process_index, d.id))
        n = len(devices)
        boxes = [_numbers(_boxes(side, shape), devices, ndim) for side in shardings]
        blocks = [side.shard_shape(shape) for side in shardings]
    else:
        n = _check.positive(op, "axis_sizes", num_ranks)
        named = zip(("source", "destination"), shardings, strict=True)
        sides = [Side.of(op, what, side, ("rank",), (n,)) for what, side in named]
        boxes = [side.boxes(shape) for side in sides]
        blocks = [side.block(op, shape) for side in sides]
    attributes = {"group_size": n, "sources": boxes[0], "destinations": boxes[1]}
    attributes |= {"input_shape": (1, *blocks[0]), "output_shape": (1, *blocks[1])}
    attributes["asynchronous"] = int(op.endswith("_start"))
    return attributes, str(jax.numpy.dtype(in_bytes(x.dtype))), (math.prod(blocks[0]), math.prod(blocks[1]))
