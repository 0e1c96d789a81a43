"""psum_scatter: the sum of all ranks' arrays, one block per rank (native name: reduce_scatter)."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import ReduceOp, contiguous_count, define, in_wider_type, make_call, shift
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree


def psum_scatter(
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> PyTree:
    """Sums x over the ranks of a group; rank r gets block r of the sum.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank.
      axis_name: mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group.
      scatter_dimension: dimension of x that is split into n blocks. Its size is n (not tiled) or a multiple of n
        (tiled). Negative values count from the end.
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
      tiled: keep ``scatter_dimension`` (divided by n) instead of removing it.
      algorithm: a name from ``algorithms("psum_scatter")``, or "xla" for XLA's own collective. None lets
        the selection table choose.
      max_sms: the most multiprocessors of a GPU that the call occupies; None means JAXCOMM_MAX_SMS. See jaxcomm.ops.

    Returns:
      Block r of the sum on rank r: the shape of x without ``scatter_dimension`` (not tiled), or with its size divided
      by n (tiled). 8- and 16-bit floats are accumulated in f32.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: invalid sizes, dimension, groups or algorithm (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: (n - 1) * block bytes read or sent per rank.
    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
    """
    op = "psum_scatter"
    call = make_call(op, "reduce_scatter", _check.axes(op, axis_name), axis_index_groups, algorithm, max_sms)
    return jax.tree.map(_transfer(call, scatter_dimension, tiled), jax.tree.map(jax.numpy.asarray, x))


def psum_scatter_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    algorithm: str | None = None,
    max_sms: int | None = None,
    after: PyTree = (),
) -> Pending:
    """Starts a psum_scatter. Computations can run beside the transfer until ``done()`` of the result.

    Arguments, errors and cost are those of psum_scatter. See docs/guide/overlap.md.

    Args:
      after: pytree of arrays that have been computed before the transfer starts.

    Returns:
      A Pending. ``done()`` returns the same bits as psum_scatter.
    """
    op = "psum_scatter_start"
    axes = _check.axes(op, axis_name)
    call = make_call(op, "reduce_scatter", axes, axis_index_groups, algorithm, max_sms, asynchronous=True)
    return _pending.start(call, _transfer(call, scatter_dimension, tiled), jax.tree.map(jax.numpy.asarray, x), after)


def _transfer(call: Call, scatter_dimension: int, tiled: bool) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes, groups = call.op, call.axes, call.groups
    n = _check.group_size(axes, groups)

    def scatter(leaf, axis, after):
        return in_wider_type(lambda wide: reduce_scatter_p.bind(wide, *after, call=call, axis=axis), leaf)

    def bind(leaf, *after):
        if not axes:
            return leaf
        _check.element_type(op, leaf)
        if leaf.dtype == np.bool_:
            raise TypeError(f"{op}: x has element type bool, which can't be summed; convert it to an integer type")
        axis = _check.dimension(op, "scatter_dimension", scatter_dimension, leaf.ndim)
        if _compat.unreduced_axes(leaf):  # a pending sum
            return lax.psum_scatter(leaf, axes, scatter_dimension=axis, axis_index_groups=groups, tiled=tiled)
        leaf = _compat.make_varying(leaf, axes)
        if tiled:
            _check.divisible(op, "scatter_dimension", axis, leaf.shape, n, axes)
            return scatter(leaf, axis, after)
        _check.equal(op, "scatter_dimension", axis, leaf.shape, n, axes)
        return lax.squeeze(scatter(leaf, axis, after), (axis,))

    return bind


def _shape(x, *, call, axis):
    _check.unsharded(call.op, "scatter_dimension", axis, x)
    shape = list(x.shape)
    shape[axis] //= _check.group_size(call.axes, call.groups)
    return x.update(shape=tuple(shape))


def _attributes(x, n, *, axis):
    block = list(x.shape)
    block[axis] //= n
    return {"input_contiguous_count": np.int64(contiguous_count(block, axis)), "reduce_op": np.int64(ReduceOp.SUM)}


def _transpose(ct, x, *, call, axis):
    from jaxcomm.ops.all_gather import all_gather_p

    return _pending.whole(all_gather_p, ct, call=call, axis=axis)


def _batch(bind, x, d, *, call, axis):
    return bind(x, call=call, axis=shift(axis, d)), d


def _batch_named(bind, axis_data, x, d, *, call, axis):
    if call.groups is not None or len(call.axes) > 1:
        raise NotImplementedError(
            f"{call.op}: an axis of vmap can't be combined with further axes or axis_index_groups, got axes {call.axes}"
        )
    total = x * axis_data.size if d is None else x.sum(axis=d, dtype=x.dtype)
    n = axis_data.size
    return total.reshape(*total.shape[:axis], n, total.shape[axis] // n, *total.shape[axis + 1 :]), axis


def _xla(x, *, call, axis):
    return lax.psum_scatter(x, call.axes, axis_index_groups=call.groups, scatter_dimension=axis, tiled=True)


reduce_scatter_p = define(
    "reduce_scatter",
    shape=_shape,
    attributes=_attributes,
    transpose=_transpose,
    batch=_batch,
    batch_named=_batch_named,
    xla=_xla,
)
