"""all_to_all: every rank sends a different block to every rank."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import contiguous_count, define, shift
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call


@collective()
def all_to_all(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    **options: Unpack[Options],
) -> PyTree:
    """Splits x into one block per rank, sends block j to rank j, and joins the received blocks in rank order.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank. Dimension ``split_axis`` has size n (not tiled)
        or a multiple of n (tiled).
      split_axis: dimension of x that is split into n blocks; negative values count from the end.
      concat_axis: dimension of the result along which the n blocks are joined (tiled), or position of the new
        dimension after ``split_axis`` has been removed (not tiled).
      tiled: keep the number of dimensions instead of removing ``split_axis`` and inserting ``concat_axis``.

    Returns:
      Arrays with ``split_axis`` divided and ``concat_axis`` multiplied by n (tiled), or with ``split_axis`` removed and
      a dimension of size n inserted at ``concat_axis`` (not tiled). Block j came from rank j.

    Raises:
      ValueError: invalid sizes, dimensions, groups or algorithm (when tracing).

    Cost: direct, (n - 1) * block bytes sent per rank in n - 1 messages; hierarchical, n / L - 1 inter-node messages of
    L blocks, with L ranks per node. See docs/reference/algorithms.md.
    """
    call = make_call("all_to_all", "all_to_all", axis_name, axis_index_groups, options)
    return jax.tree.map(_transfer(call, split_axis, concat_axis, tiled), x)


@collective(like=all_to_all)
def all_to_all_start(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts an all_to_all; ``done()`` of the result ends it."""
    call = make_call("all_to_all_start", "all_to_all", axis_name, axis_index_groups, options)
    return _pending.start(call, _transfer(call, split_axis, concat_axis, tiled), x, options)


def _transfer(call: Call, split_axis: int, concat_axis: int, tiled: bool) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes = call.op, call.axes
    n = _check.group_size(axes, call.groups)

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
        _check.element_type(op, leaf)
        split = _check.dimension(op, "split_axis", split_axis, leaf.ndim)
        concat = _check.dimension(op, "concat_axis", concat_axis, leaf.ndim)
        leaf = _compat.make_varying(leaf, axes)
        if tiled:
            _check.divisible(op, "split_axis", split, leaf.shape, n, axes)
            return all_to_all_p.bind(leaf, *after, call=call, split_axis=split, concat_axis=concat)
        _check.equal(op, "split_axis", split, leaf.shape, n, axes)
        if split == concat:
            return all_to_all_p.bind(leaf, *after, call=call, split_axis=split, concat_axis=concat)
        # concat_axis counts the dimensions without split_axis. Insert the new dimension, then drop split_axis.
        concat += split < concat
        split += concat <= split
        leaf = lax.expand_dims(leaf, (concat,))
        y = all_to_all_p.bind(leaf, *after, call=call, split_axis=split, concat_axis=concat)
        return lax.squeeze(y, (split,))

    return bind


def _shape(x, *, call, split_axis, concat_axis):
    n = _check.group_size(call.axes, call.groups)
    for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis)):
        _check.unsharded(call.op, name, axis, x)
    shape = list(x.shape)
    shape[split_axis] //= n
    shape[concat_axis] *= n
    return x.update(shape=tuple(shape), weak_type=False)


def _attributes(x, n, *, split_axis, concat_axis):
    block = list(x.shape)
    block[split_axis] //= n
    return {
        "input_contiguous_count": np.int64(contiguous_count(block, split_axis)),
        "output_contiguous_count": np.int64(contiguous_count(block, concat_axis)),
    }


def _transpose(ct, _, *, call, split_axis, concat_axis):
    return _pending.complete(all_to_all_p, ct, call=call, split_axis=concat_axis, concat_axis=split_axis)


def _batch(bind, x, d, *, call, split_axis, concat_axis):
    return bind(x, call=call, split_axis=shift(split_axis, d), concat_axis=shift(concat_axis, d)), d


def _batch_named(bind, axis_data, x, d, *, call, **params):
    if d is None:  # JAX's rule returns a wrong shape for an operand that is not batched
        x, d = lax.broadcast(x, (axis_data.size,)), 0
    # One of the axes is the vmapped one, so part of the exchange stays on the device. JAX's rule handles that.
    return _compat.batch_like(
        lax.all_to_all_p, axis_data, x, d, axis_name=call.axes, axis_index_groups=None, tiled=True, **params
    )


def _xla(x, *, call, split_axis, concat_axis):
    return lax.all_to_all(x, call.axes, split_axis, concat_axis, axis_index_groups=call.groups, tiled=True)


all_to_all_p = define(
    "all_to_all",
    shape=_shape,
    attributes=_attributes,
    transpose=_transpose,
    batch=_batch,
    batch_named=_batch_named,
    xla=_xla,
)
