"""pbroadcast: every rank gets one rank's array (native name: broadcast)."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import define
from jaxcomm._typing import AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call
from jaxcomm.ops.psum import psum, psum_start


@collective()
def pbroadcast(x: PyTree, axis_name: AxisName, source: int, **options: Unpack[Options]) -> PyTree:
    """Copies the x of rank ``source`` to every rank.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank. Only the values of ``source`` are used.
      source: rank that broadcasts, 0 to n - 1; a static integer.

    Returns:
      Arrays of the shapes of x.

    Raises:
      ValueError: source out of range, or unknown algorithm (when tracing).

    Cost: n - 1 messages of the size of x from the source (direct), or a depth of log2 n messages (tree).
    """
    call = make_call("pbroadcast", "broadcast", axis_name, None, options)
    return jax.tree.map(_transfer(call, source), x)


@collective(like=pbroadcast)
def pbroadcast_start(
    x: PyTree,
    axis_name: AxisName,
    source: int,
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts a pbroadcast; ``done()`` of the result ends it."""
    call = make_call("pbroadcast_start", "broadcast", axis_name, None, options)
    return _pending.start(call, _transfer(call, source), x, options)


def _transfer(call: Call, source: int) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes = call.op, call.axes
    root = _check.integer(op, "source", source)
    n = lax.axis_size(axes)
    if not 0 <= root < n:
        raise ValueError(f"{op}: source must be a rank from 0 to {n - 1}, got {root}")

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
        _check.element_type(op, leaf)
        return broadcast_p.bind(_compat.make_varying(leaf, axes), *after, call=call, source=root)

    return bind


def _attributes(x, n, *, source):
    return {"root": np.int64(source)}


def _transpose(ct, x, *, call, source):
    # The source gets the sum of all ranks' cotangents.
    total = _sum(ct, call)
    return jnp.where(lax.axis_index(call.axes) == source, total, jnp.zeros_like(total))


def _sum(ct, call):
    if call.asynchronous:
        return psum_start(ct, call.axes, max_sms=call.max_sms).done()
    return psum(ct, call.axes, max_sms=call.max_sms)


def _batch_named(bind, axis_data, x, d, *, call, source):
    # The source is one position along the vmapped axis and one rank along the rest.
    sizes = tuple(lax.axis_size(a) for a in call.axes)
    where = dict(zip(call.axes, np.unravel_index(source, sizes), strict=True))
    if d is not None:
        x = lax.index_in_dim(x, int(where[axis_data.name]), d, keepdims=False)
    rest = tuple(a for a in call.axes if a != axis_data.name)
    if not rest:
        return x, None
    rest_source = np.ravel_multi_index([where[a] for a in rest], [lax.axis_size(a) for a in rest])
    return bind(x, call=call.over(rest), source=int(rest_source)), None


def _xla(x, *, call, source):
    # XLA has no broadcast on CPU; a masked sum would lose the sign of zeros.
    return lax.index_in_dim(lax.all_gather(x, call.axes), source, keepdims=False)


broadcast_p = define(
    "broadcast",
    attributes=_attributes,
    transpose=_transpose,
    batch_named=_batch_named,
    xla=_xla,
)
