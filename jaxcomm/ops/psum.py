"""psum, pmean, pmax, pmin: the same sum, mean, maximum or minimum on every rank (native name: all_reduce)."""

import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._core.plan import ReduceOp
from jaxcomm._pending import Pending
from jaxcomm._primitive import define, in_wider_type
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call

_POSITIONAL: dict[ReduceOp, Callable[..., Any]] = {ReduceOp.SUM: jnp.sum, ReduceOp.MAX: jnp.max, ReduceOp.MIN: jnp.min}


@collective()
def psum(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[Options],
) -> PyTree:
    """Sums x over the ranks of a group; every rank gets the sum.

    The native operation is all_reduce. The sum is bit-identical on all ranks and in every execution. One exception:
    ``algorithm="multimem"``, for GPUs with NVLink SHARP, may give other bits in another execution.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank. Booleans are summed as int32. A leaf that is
        not a tracer is multiplied by the group size without communication.
      axis_name: mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group. Several axes declare
        a hierarchy: the innermost axis stays inside a node. Under check_vma=False, an integer is a dimension of x to
        sum over as well.
      axis_index_groups: groups as lists of ranks; None means one group of all ranks. jax.lax.psum handles groups of
        unequal sizes, and arrays whose type is unreduced (pending sums).

    Returns:
      Arrays of the shapes of x. 8- and 16-bit floats are accumulated in f32.

    Raises:
      ValueError: invalid groups or algorithm (when tracing).

    Cost: 2 (n - 1) / n * bytes moved per rank for large arrays. See docs/reference/algorithms.md for small arrays.
    Source: Rabenseifner, ICCS 2004, doi 10.1007/978-3-540-24685-5_1; Patarasuk and Yuan, JPDC 69(2), 2009.
    """
    return _all_reduce("psum", ReduceOp.SUM, x, axis_name, axis_index_groups, options)


@collective(like=psum)
def psum_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts a psum; ``done()`` of the result ends it."""
    call, bind = _transfer("psum_start", ReduceOp.SUM, axis_name, axis_index_groups, options)
    return _pending.start(call, bind, x, options)


@collective(like=psum)
def pmean(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[Options],
) -> PyTree:
    """Averages x over the ranks of a group: psum divided by the number of elements of each sum.

    Args:
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.

    Returns:
      Arrays of the shapes of x; integer arrays give floats.
    """
    sums = _all_reduce("pmean", ReduceOp.SUM, x, axis_name, axis_index_groups, options)
    axes, positional = _axes("pmean", axis_name)
    n = lax.psum(1, axes, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda leaf, s: s / (n * math.prod(jnp.shape(leaf)[d] for d in positional)), x, sums)


@collective(like=psum)
def pmax(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[Options],
) -> PyTree:
    """Takes the elementwise maximum of x over the ranks of a group; NaN where any rank has NaN.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank, with real element types.

    Returns:
      Arrays of the shapes and element types of x. There is no derivative, as in jax.lax.
    """
    return _all_reduce("pmax", ReduceOp.MAX, x, axis_name, axis_index_groups, options)


@collective(like=psum)
def pmin(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[Options],
) -> PyTree:
    """Takes the elementwise minimum of x over the ranks of a group; NaN where any rank has NaN.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank, with real element types.

    Returns:
      Arrays of the shapes and element types of x. There is no derivative, as in jax.lax.
    """
    return _all_reduce("pmin", ReduceOp.MIN, x, axis_name, axis_index_groups, options)


def _all_reduce(op, reduce_op, x, axis_name, axis_index_groups, options):
    _, bind = _transfer(op, reduce_op, axis_name, axis_index_groups, options)
    return jax.tree.map(bind, x)


def _axes(op, axis_name):
    """Checks axis_name. Returns mesh axes and dimensions."""
    names = _check.axes(op, axis_name, dimensions=True)
    return tuple(a for a in names if not isinstance(a, int)), tuple(a for a in names if isinstance(a, int))


def _transfer(op, reduce_op, axis_name, axis_index_groups, options):
    """Checks the arguments. Returns a Call and the transfer of one array."""
    axes, positional = _axes(op, axis_name)
    if positional and axis_index_groups is not None:
        raise ValueError(
            f"{op}: axis_index_groups can't be combined with array dimensions in axis_name, got {positional}"
        )
    unequal = op != "pmean"  # jax.lax divides by the size of the first group
    call = make_call(op, "all_reduce", axes, axis_index_groups, options, unequal=unequal)
    groups = call.groups
    summed = reduce_op == ReduceOp.SUM

    def bind(leaf, *after):
        if summed and not _compat.is_tracer(leaf):
            return lax.psum(leaf, axes + positional, axis_index_groups=groups)  # a constant: no communication
        leaf = jnp.asarray(leaf)
        _check.element_type(op, leaf, ordered=not summed)
        if _compat.unreduced_axes(leaf) or not _check.equal_sizes(groups):
            return _LAX[reduce_op](leaf, axes + positional, axis_index_groups=groups)
        if summed and leaf.dtype == np.bool_:
            leaf = leaf.astype(np.int32)
        if positional:
            leaf = _POSITIONAL[reduce_op](leaf, axis=positional).astype(leaf.dtype)  # sums of int8 become int32
        if not axes:
            return leaf
        primitive = all_reduce_p if summed else all_reduce_ordered_p
        leaf = _compat.make_varying(leaf, axes)
        return in_wider_type(lambda wide: primitive.bind(wide, *after, call=call, reduce_op=reduce_op), leaf)

    return call, bind


_LAX: dict[ReduceOp, Callable[..., Any]] = {ReduceOp.SUM: lax.psum, ReduceOp.MAX: lax.pmax, ReduceOp.MIN: lax.pmin}


def _shape(x, *, call, reduce_op):
    varying = _compat.varying_axes(x)
    if call.groups is None:  # with groups, results differ between them
        varying = varying - set(call.axes)
    return _compat.with_varying(x.update(weak_type=False), varying)


def _attributes(x, n, *, reduce_op):
    return {"reduce_op": np.int64(reduce_op)}


def _transpose(ct, x, *, call, reduce_op):
    invariant = tuple(a for a in call.axes if a in _compat.varying_axes(x) and a not in _compat.varying_axes(ct))
    if invariant:
        # varying -> invariant: the transpose only changes the type.
        return _compat.make_varying(ct, invariant)
    # Where types don't track varying axes, jax.lax defines psum to be its own transpose.
    return _pending.complete(all_reduce_p, ct, call=call, reduce_op=reduce_op)


def _batch_named(bind, axis_data, x, d, *, call, reduce_op):
    if d is not None:
        x = _POSITIONAL[reduce_op](x, axis=d).astype(x.dtype)
    elif reduce_op == ReduceOp.SUM:
        x = x * axis_data.size
    rest = tuple(a for a in call.axes if a != axis_data.name)
    return (bind(x, call=call.over(rest), reduce_op=reduce_op) if rest else x), None


def _xla(x, *, call, reduce_op):
    if reduce_op == ReduceOp.SUM and call.groups is not None:  # lax.psum rejects groups under check_vma
        return _compat.psum_of_groups(x, call.axes, call.groups)
    return _LAX[reduce_op](x, call.axes, axis_index_groups=call.groups)


all_reduce_p = define(
    "all_reduce",
    shape=_shape,
    attributes=_attributes,
    transpose=_transpose,
    batch_named=_batch_named,
    xla=_xla,
)
# Maximum and minimum are not linear. They have no derivative, as in jax.lax.
all_reduce_ordered_p = define("all_reduce", shape=_shape, attributes=_attributes, batch_named=_batch_named, xla=_xla)
