"""psum_scatter: the sum of all ranks' arrays, one block per rank (native name: reduce_scatter)."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._core.plan import ReduceOp
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import contiguous_count, define, in_wider_type, one_axis, set_transpose, shift
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call
from jaxcomm.ops.all_gather import all_gather_p


@collective()
def psum_scatter(
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    **options: Unpack[Options],
) -> PyTree:
    """Sums x over the ranks of a group; rank r gets block r of the sum.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank.
      scatter_dimension: dimension of x that is split into n blocks. Its size is n (not tiled) or a multiple of n
        (tiled). Negative values count from the end.
      tiled: keep ``scatter_dimension`` (divided by n) instead of removing it.

    Returns:
      Block r of the sum on rank r. It has the shape of x without ``scatter_dimension`` (not tiled), or with its size
      divided by n (tiled). 8- and 16-bit floats are accumulated in f32.

    Raises:
      ValueError: invalid sizes, dimension, groups or algorithm (when tracing).

    Cost: (n - 1) * block bytes read or sent per rank.
    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
    """
    call = make_call("psum_scatter", "reduce_scatter", axis_name, axis_index_groups, options)
    return jax.tree.map(_transfer(call, scatter_dimension, tiled), x)


@collective(like=psum_scatter)
def psum_scatter_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups | None = None,
    tiled: bool = False,
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts a psum_scatter; ``done()`` of the result ends it."""
    call = make_call("psum_scatter_start", "reduce_scatter", axis_name, axis_index_groups, options)
    return _pending.start(call, _transfer(call, scatter_dimension, tiled), x, options)


def _transfer(call: Call, scatter_dimension: int, tiled: bool) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes, groups = call.op, call.axes, call.groups
    n = _check.group_size(axes, groups)

    def scatter(leaf, axis, after):
        return in_wider_type(lambda wide: reduce_scatter_p.bind(wide, *after, call=call, axis=axis), leaf)

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
        if not axes:
            return leaf
        _check.element_type(op, leaf, booleans=False)
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
    return _pending.complete(all_gather_p, ct, call=call, axis=axis)


def _batch(bind, x, d, *, call, axis):
    return bind(x, call=call, axis=shift(axis, d)), d


def _batch_named(bind, axis_data, x, d, *, call, axis):
    one_axis(call)
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


def _transpose_all_gather(ct, x, *, call, axis):
    ct = _compat.make_varying(ct, call.axes)
    return in_wider_type(lambda wide: _pending.complete(reduce_scatter_p, wide, call=call, axis=axis), ct)


set_transpose(all_gather_p, _transpose_all_gather)
