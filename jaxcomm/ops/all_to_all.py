"""all_to_all: every rank sends a different block to every rank."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import contiguous_count, define, make_call, shift
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree


def all_to_all(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> PyTree:
    """Splits x into one block per rank, sends block j to rank j, and joins the received blocks in rank order.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank. Dimension ``split_axis`` has size n (not tiled)
        or a multiple of n (tiled).
      axis_name: mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group. Several axes declare
        a hierarchy: the innermost axis stays inside a node.
      split_axis: dimension of x that is split into n blocks; negative values count from the end.
      concat_axis: dimension of the result along which the n blocks are joined (tiled), or position of the new
        dimension after ``split_axis`` has been removed (not tiled).
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
      tiled: keep the number of dimensions instead of removing ``split_axis`` and inserting ``concat_axis``.
      algorithm: a name from ``algorithms("all_to_all")``, or "xla" for XLA's own collective. None lets
        the selection table choose.
      max_sms: the most multiprocessors of a GPU that the call occupies; None means JAXCOMM_MAX_SMS. See jaxcomm.ops.

    Returns:
      Arrays with ``split_axis`` divided and ``concat_axis`` multiplied by n (tiled), or with ``split_axis`` removed and
      a dimension of size n inserted at ``concat_axis`` (not tiled). Block j came from rank j.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: invalid sizes, dimensions, groups or algorithm (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: direct, (n - 1) * block bytes sent per rank in n - 1 messages; hierarchical, n / L - 1 inter-node messages of
    L blocks, with L ranks per node. See docs/reference/algorithms.md.
    """
    op = "all_to_all"
    call = make_call(op, op, _check.axes(op, axis_name), axis_index_groups, algorithm, max_sms)
    return jax.tree.map(_transfer(call, split_axis, concat_axis, tiled), jax.tree.map(jax.numpy.asarray, x))


def all_to_all_start(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    algorithm: str | None = None,
    max_sms: int | None = None,
    after: PyTree = (),
) -> Pending:
    """Starts an all_to_all. Computations can run beside the transfer until ``done()`` of the result.

    Arguments, errors and cost are those of all_to_all. See docs/guide/overlap.md.

    Args:
      after: pytree of arrays that have been computed before the transfer starts.

    Returns:
      A Pending. ``done()`` returns the same bits as all_to_all.
    """
    op = "all_to_all_start"
    axes = _check.axes(op, axis_name)
    call = make_call(op, "all_to_all", axes, axis_index_groups, algorithm, max_sms, asynchronous=True)
    transfer = _transfer(call, split_axis, concat_axis, tiled)
    return _pending.start(call, transfer, jax.tree.map(jax.numpy.asarray, x), after)


def _transfer(call: Call, split_axis: int, concat_axis: int, tiled: bool) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes = call.op, call.axes
    n = _check.group_size(axes, call.groups)

    def bind(leaf, *after):
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
    return _pending.whole(all_to_all_p, ct, call=call, split_axis=concat_axis, concat_axis=split_axis)


def _batch(bind, x, d, *, call, split_axis, concat_axis):
    return bind(x, call=call, split_axis=shift(split_axis, d), concat_axis=shift(concat_axis, d)), d


def _batch_named(bind, axis_data, x, d, *, call, **params):
    if call.groups is not None:
        raise NotImplementedError(f"{call.op}: an axis of vmap can't be combined with axis_index_groups")
    if d is None:  # JAX's rule returns a wrong shape for an operand that is not batched
        x, d = lax.broadcast(x, (axis_data.size,)), 0
    # One of the axes is the vmapped one, so part of the exchange stays on the device. JAX's rule handles that.
    return _compat.batch_like(
        lax.all_to_all_p, axis_data, x, d, axis_name=call.axes, axis_index_groups=call.groups, tiled=True, **params
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
