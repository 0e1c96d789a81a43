"""all_gather: every rank gets every rank's block."""

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


def all_gather(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> PyTree:
    """Joins the blocks of all ranks along ``axis``; every rank gets all blocks in rank order.

    Args:
      x: pytree of this rank's blocks, (..., d, ...), with the same shapes and dtypes on every rank.
      axis_name: mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group.
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
      axis: position of d (tiled) or of the new dimension of size n (not tiled); negative values count from the end.
      tiled: join along ``axis`` instead of adding a dimension.
      to: type of the result under check_vma=True, as in jax.lax.all_gather: "varying", "invarying" or "reduced".
        "reduced" calls jax.lax.all_gather.
      algorithm: a name from ``algorithms("all_gather")``, or "xla" for XLA's own collective. None lets
        the selection table choose.
      max_sms: the most multiprocessors of a GPU that the call occupies; None means JAXCOMM_MAX_SMS. See jaxcomm.ops.

    Returns:
      (..., n * d, ...) if tiled, else (..., n, d, ...); block r came from rank r.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: invalid axis, groups, ``to`` or algorithm (when tracing).
      NotImplementedError: ``to`` is not "varying" and there are groups (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: (n - 1) * block bytes sent per rank; n - 1 messages (direct, ring) or log2 n messages (recursive doubling).
    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
    """
    op = "all_gather"
    call = make_call(op, op, _check.axes(op, axis_name), axis_index_groups, algorithm, max_sms)
    return jax.tree.map(_transfer(call, axis, tiled, to), jax.tree.map(jax.numpy.asarray, x))


def all_gather_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: str | None = None,
    max_sms: int | None = None,
    after: PyTree = (),
) -> Pending:
    """Starts an all_gather. Computations can run beside the transfer until ``done()`` of the result.

    Arguments, errors and cost are those of all_gather. See docs/guide/overlap.md.

    Args:
      after: pytree of arrays that have been computed before the transfer starts.

    Returns:
      A Pending. ``done()`` returns the same bits as all_gather.
    """
    op = "all_gather_start"
    axes = _check.axes(op, axis_name)
    call = make_call(op, "all_gather", axes, axis_index_groups, algorithm, max_sms, asynchronous=True)
    return _pending.start(call, _transfer(call, axis, tiled, to), jax.tree.map(jax.numpy.asarray, x), after)


def _transfer(call: Call, axis: int, tiled: bool, to: str) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes, groups = call.op, call.axes, call.groups
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(f"{op}: to must be 'varying', 'invarying' or 'reduced', got {to!r}")
    if to != "varying" and groups is not None:
        raise NotImplementedError(f"{op}: to={to!r} can't be combined with axis_index_groups; use to='varying'")

    def bind(leaf, *after):
        if to == "reduced":
            return lax.all_gather(leaf, axes, axis=axis, tiled=tiled, to=to)
        if not axes:
            return leaf
        _check.element_type(op, leaf)
        dimension = _check.dimension(op, "axis", axis, leaf.ndim + (not tiled))
        leaf = _compat.make_varying(leaf, axes)
        if not tiled:
            leaf = lax.expand_dims(leaf, (dimension,))
        primitive = all_gather_p if to == "varying" else all_gather_invariant_p
        return primitive.bind(leaf, *after, call=call, axis=dimension)

    return bind


def _shape(x, *, call, axis):
    _check.unsharded(call.op, "axis", axis, x)
    shape = list(x.shape)
    shape[axis] *= _check.group_size(call.axes, call.groups)
    return x.update(shape=tuple(shape))


def _shape_invariant(x, *, call, axis):
    return _compat.with_varying(_shape(x, call=call, axis=axis), _compat.varying_axes(x) - set(call.axes))


def _attributes(x, n, *, axis):
    return {"output_contiguous_count": np.int64(contiguous_count(x.shape, axis))}


def _transpose(ct, x, *, call, axis):
    from jaxcomm.ops.psum_scatter import reduce_scatter_p

    return _pending.whole(reduce_scatter_p, _compat.make_varying(ct, call.axes), call=call, axis=axis)


def _transpose_invariant(ct, x, *, call, axis):
    start = lax.axis_index(call.axes) * x.shape[axis]
    return lax.dynamic_slice_in_dim(_compat.make_varying(ct, call.axes), start, x.shape[axis], axis)


def _batch(bind, x, d, *, call, axis):
    return bind(x, call=call, axis=shift(axis, d)), d


def _batch_named(bind, axis_data, x, d, *, call, axis):
    if call.groups is not None or len(call.axes) > 1:
        raise NotImplementedError(
            f"{call.op}: an axis of vmap can't be combined with further axes or axis_index_groups, got axes {call.axes}"
        )
    n = axis_data.size
    return _compat.batch_like(
        lax.all_gather_p,
        axis_data,
        x,
        d,
        axis_name=call.axes,
        axis_index_groups=call.groups,
        axis_size=n,
        all_gather_dimension=axis,
        tiled=True,
    )


def _xla(x, *, call, axis):
    return lax.all_gather(x, call.axes, axis_index_groups=call.groups, axis=axis, tiled=True)


all_gather_p = define(
    "all_gather",
    shape=_shape,
    attributes=_attributes,
    transpose=_transpose,
    batch=_batch,
    batch_named=_batch_named,
    xla=_xla,
)
all_gather_invariant_p = define(
    "all_gather",
    shape=_shape_invariant,
    attributes=_attributes,
    transpose=_transpose_invariant,
    batch=_batch,
    batch_named=_batch_named,
    xla=_xla,
)
