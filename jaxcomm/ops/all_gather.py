"""all_gather: every rank gets every rank's block."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import contiguous_count, define, one_axis, shift
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call


@collective()
def all_gather(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    **options: Unpack[Options],
) -> PyTree:
    """Joins the blocks of all ranks along ``axis``; every rank gets all blocks in rank order.

    Args:
      x: pytree of this rank's blocks, (..., d, ...), with the same shapes and dtypes on every rank.
      axis: position of d (tiled) or of the new dimension of size n (not tiled); negative values count from the end.
      tiled: join along ``axis`` instead of adding a dimension.
      to: type of the result under check_vma=True, as in jax.lax.all_gather: "varying", "invarying" or "reduced".
        "reduced" calls jax.lax.all_gather.

    Returns:
      (..., n * d, ...) if tiled, else (..., n, d, ...); block r came from rank r.

    Raises:
      ValueError: invalid axis, groups, ``to`` or algorithm (when tracing).
      NotImplementedError: ``to`` is not "varying" and there are groups (when tracing).

    Cost: (n - 1) * block bytes sent per rank; n - 1 messages (direct, ring) or log2 n messages (recursive doubling).
    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
    """
    call = make_call("all_gather", "all_gather", axis_name, axis_index_groups, options)
    return jax.tree.map(_transfer(call, axis, tiled, to), x)


@collective(like=all_gather)
def all_gather_start(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts an all_gather; ``done()`` of the result ends it."""
    call = make_call("all_gather_start", "all_gather", axis_name, axis_index_groups, options)
    return _pending.start(call, _transfer(call, axis, tiled, to), x, options)


def _transfer(call: Call, axis: int, tiled: bool, to: str) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes, groups = call.op, call.axes, call.groups
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(f"{op}: to must be 'varying', 'invarying' or 'reduced', got {to!r}")
    if to != "varying" and groups is not None:
        raise NotImplementedError(f"{op}: to={to!r} can't be combined with axis_index_groups; use to='varying'")

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
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


def _transpose_invariant(ct, x, *, call, axis):
    start = lax.axis_index(call.axes) * x.shape[axis]
    return lax.dynamic_slice_in_dim(_compat.make_varying(ct, call.axes), start, x.shape[axis], axis)


def _batch(bind, x, d, *, call, axis):
    return bind(x, call=call, axis=shift(axis, d)), d


def _batch_named(bind, axis_data, x, d, *, call, axis):
    one_axis(call)
    return _compat.batch_like(
        lax.all_gather_p,
        axis_data,
        x,
        d,
        axis_name=call.axes,
        axis_index_groups=None,
        axis_size=axis_data.size,
        all_gather_dimension=axis,
        tiled=True,
    )


def _xla(x, *, call, axis):
    return lax.all_gather(x, call.axes, axis_index_groups=call.groups, axis=axis, tiled=True)


# psum_scatter.py sets the transpose: each of the two is that of the other.
all_gather_p = define(
    "all_gather",
    shape=_shape,
    attributes=_attributes,
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
