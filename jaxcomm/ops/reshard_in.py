"""reshard_in: an array that is sharded over ranks gets another sharding (native name: reshard)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import define, one_axis
from jaxcomm._typing import AxisName, AxisNames, PyTree
from jaxcomm.ops._shards import (
    Box,
    RankSharding,
    Side,
    boxes_of,
    copies_of,
    held_shape,
    leaves_gaps,
    numbers_of,
    part_of,
    rounds_of,
)
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call
from jaxcomm.ops.ppermute import lax_ppermute


@collective()
def reshard_in(
    x: PyTree,
    axis_name: AxisName,
    source: P | RankSharding,
    destination: P | RankSharding,
    *,
    shape: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> PyTree:
    """Moves an array that is sharded over the ranks of a group to another sharding, with the fewest bytes.

    Each rank receives the elements of its new shard that it lacks, each of them once. jaxcomm.reshard does the same
    outside of jit.

    Args:
      x: pytree of arrays, this rank's shards of arrays with the same number of dimensions. The copies of a shard on
        several ranks must be equal. Ranks without a shard pass an array of the same shape, which is not read.
      source: how the arrays are sharded: a jax.sharding.PartitionSpec of axes of ``axis_name``, or a RankSharding.
      destination: how the results are sharded, in the same form. An axis that it does not name has copies.
      shape: shape of the global arrays; None means that all shards are full. Otherwise, shards have the size of the
        dimension divided by the number of shards, rounded up, and the last ones may be smaller: their arrays begin
        with them.

    Returns:
      This rank's shards of the results. Elements outside of the shard are zero, and so are arrays of ranks without one.
      Under check_vma=True, results do not vary over axes that a PartitionSpec ``destination`` does not name.

    Raises:
      ValueError: a spec names an unknown axis, or one twice, ranks are not valid, the shape does not fit the shards, or
        unknown algorithm (when tracing).

    Cost: each rank receives the elements of its new shard that it did not have.
    Source: Thakur, Choudhary, Ramanujam, IEEE TPDS 7(6), 1996.
    """
    call = make_call("reshard_in", "reshard", axis_name, None, options)
    return jax.tree.map(_transfer(call, source, destination, shape), x)


@collective(like=reshard_in)
def reshard_in_start(
    x: PyTree,
    axis_name: AxisName,
    source: P | RankSharding,
    destination: P | RankSharding,
    *,
    shape: Sequence[int] | None = None,
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts a reshard_in; ``done()`` of the result ends it."""
    call = make_call("reshard_in_start", "reshard", axis_name, None, options)
    return _pending.start(call, _transfer(call, source, destination, shape), x, options)


def _transfer(call: Call, source: Any, destination: Any, shape: Sequence[int] | None) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes = call.op, call.axes
    sizes = [lax.axis_size(a) for a in axes]
    held, wanted = (
        Side.of(op, what, side, axes, sizes) for what, side in (("source", source), ("destination", destination))
    )
    if shape is not None:
        shape = tuple(_check.integer(op, "shape", size) for size in shape)

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
        _check.element_type(op, leaf)
        for i in range(leaf.ndim):
            _check.unsharded(op, "x.shape", i, jax.typeof(leaf))
        whole = held.whole(op, leaf.shape) if shape is None else shape
        if held.block(op, whole) != leaf.shape:
            raise ValueError(
                f"{op}: a shard of an array of shape {whole} has shape {held.block(op, whole)} by source {held.spec}, "
                f"got {leaf.shape}"
            )
        result = wanted.block(op, whole)
        destinations = wanted.boxes(whole)
        return reshard_p.bind(
            _compat.make_varying(leaf, held.varying),
            *after,
            call=call,
            sources=held.boxes(whole),
            destinations=destinations,
            result=result,
            over=_tracked(wanted.varying),
            onto_zeros=leaves_gaps(destinations, result, math.prod(sizes)),
            timeout_ms=0,
            numbered=False,
        )

    return bind


def _tracked(axes: AxisNames) -> AxisNames:
    """The axes over which types vary; none under check_vma=False."""
    return tuple(a for a in axes if _compat.varying_axes(lax.axis_index(a)))


def _shape(x, *, call, sources, destinations, result, over, onto_zeros, timeout_ms, numbered):
    varying = (_compat.varying_axes(x) - set(call.axes)) | set(over)
    return _compat.with_varying(x.update(shape=result, weak_type=False), varying)


def _attributes(x, n, *, sources, destinations, result, over, onto_zeros, timeout_ms, numbered):
    num_dimensions = len(sources) // (2 * n)
    return {
        "sources": np.array(sources, np.int64),
        "destinations": np.array(destinations, np.int64),
        "input_shape": np.array(held_shape(x.shape, num_dimensions), np.int64),
        "output_shape": np.array(held_shape(result, num_dimensions), np.int64),
        "timeout_ms": np.int64(timeout_ms),
        "numbered": np.int64(numbered),
    }


def _transpose(ct, x, *, call, sources, destinations, result, over, onto_zeros, timeout_ms, numbered):
    """Moves the cotangents back. One copy of an element of x gets the sum over the copies of the result.

    Along an axis over which a type does not vary, copies are one value: all copies of x get the sum, and one copy of
    the result is added.
    """
    n = lax.axis_size(call.axes)
    tracked, varying = set(_tracked(call.axes)), _compat.varying_axes(x)

    def move(ct, held, wanted, shape, over):
        destinations = numbers_of(wanted, ndim)
        return _pending.complete(
            reshard_p,
            ct,
            call=call,
            sources=numbers_of(held, ndim),
            destinations=destinations,
            result=shape,
            over=over,
            onto_zeros=leaves_gaps(destinations, shape, n),
            timeout_ms=timeout_ms,
            numbered=False,
        )

    ndim = len(sources) // (2 * n)
    held = boxes_of(destinations, n)
    firsts = copies_of(held, _alike(call.axes, tracked - set(over)))
    most = max(map(len, firsts.values()), default=0)
    if most > 1:
        # Each of R copies gets a part of all of them, and adds them: as much memory as a shard. Then no element has
        # copies.
        none: list[Box] = [()] * n
        given, stacked, parts = list(none), list(none), list(none)
        for box, ranks in firsts.items():
            for i, rank in enumerate(ranks):
                parts[rank] = part_of(box, i, len(ranks))
                given[rank] = ((i, i + 1), *box[1:])
                stacked[rank] = parts[rank] and ((0, len(ranks)), *parts[rank][1:])
        block = tuple(max(part[d][1] - part[d][0] for part in parts if part) for d in range(1, ndim))
        ct = move(ct, given, stacked, (most, *block), _tracked(call.axes))
        ct, held = jnp.sum(ct, 0).astype(ct.dtype), parts
    alike = _alike(call.axes, tracked - varying)
    boxes = boxes_of(sources, n)
    chosen = {box: ranks[0] for box, ranks in copies_of(boxes, alike).items()}
    wanted = [box if box and alike[rank] == chosen[box] else () for rank, box in enumerate(boxes)]
    return move(ct, held, wanted, x.shape, tuple(a for a in call.axes if a in varying))


def _alike(axes: AxisNames, invariant: set) -> np.ndarray:
    """For each rank, the first one that differs from it in its indices along invariant axes only."""
    sizes = [lax.axis_size(a) for a in axes]
    where = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    kept = [0 * i if axis in invariant else i for axis, i in zip(axes, where, strict=True)]
    return np.ravel_multi_index(kept, sizes)


def _batch(bind, x, d, *, sources, destinations, result, call, **params):
    n = lax.axis_size(call.axes)
    ndim = len(sources) // (2 * n)
    at = ndim - (x.ndim - 1) + d  # of the boxes
    size = x.shape[d]

    def widen(numbers):
        boxes = [(*box[:at], (0, size), *box[at:]) if box else () for box in boxes_of(numbers, n)]
        return numbers_of(boxes, ndim + 1)

    in_result = at - (ndim - len(result))
    result = (*result[:in_result], size, *result[in_result:])
    moved = {"sources": widen(sources), "destinations": widen(destinations), "result": result}
    return bind(x, call=call, **moved, **params), in_result


def _batch_named(bind, axis_data, x, d, *, call, sources, destinations, result, **params):
    one_axis(call)
    n = axis_data.size
    if d is None:
        x, d = lax.broadcast(x, (n,)), 0
    x = jnp.moveaxis(x, d, 0)
    ndim = len(sources) // (2 * n)
    held, wanted = boxes_of(sources, n), boxes_of(destinations, n)
    ends = [box[i][1] for box in held + wanted if box for i in range(ndim)]
    whole = jnp.zeros(np.reshape(ends, (-1, ndim)).max(0, initial=0), x.dtype)
    for rank, box in enumerate(held):
        if box:
            shard = x[rank].reshape(held_shape(x.shape[1:], ndim))
            whole = whole.at[_slices(box)].set(shard[tuple(slice(end - begin) for begin, end in box)])
    ys = []
    for box in wanted:
        y = jnp.zeros(held_shape(result, ndim), x.dtype)
        if box:
            y = y.at[tuple(slice(end - begin) for begin, end in box)].set(whole[_slices(box)])
        ys.append(y.reshape(result))
    return jnp.stack(ys), 0


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


def _xla(x, *, call, sources, destinations, result, **params):
    """Each element that a rank lacks moves once, by jax.lax.ppermute: one for pieces of a shape and different ranks."""
    n = lax.axis_size(call.axes)
    ndim = len(sources) // (2 * n)
    x = _compat.make_varying(x.reshape(held_shape(x.shape, ndim)), call.axes)
    y = jnp.zeros_like(x, shape=held_shape(result, ndim))
    rank = lax.axis_index(call.axes)
    for shape, pieces in rounds_of(sources, destinations, n):
        begins = np.zeros((2, n, ndim), np.int32)
        receives = np.zeros(n, bool)
        for origin, target, begin, end in pieces:
            begins[0, origin], begins[1, target], receives[target] = begin, end, True
        take, put = jnp.asarray(begins)[:, rank]
        piece = lax.dynamic_slice(x, list(take), shape)
        if any(origin != target for origin, target, *_ in pieces):
            piece = lax_ppermute(piece, call, [(origin, target) for origin, target, *_ in pieces])
        old = lax.dynamic_slice(y, list(put), shape)
        y = lax.dynamic_update_slice(y, jnp.where(jnp.asarray(receives)[rank], piece, old), list(put))
    return y.reshape(result)


reshard_p = define(
    "reshard",
    shape=_shape,
    attributes=_attributes,
    transpose=_transpose,
    batch=_batch,
    batch_named=_batch_named,
    xla=_xla,
    alone=None,  # a group of one rank may have no shard
    onto_zeros=lambda onto_zeros, **params: onto_zeros,
)
