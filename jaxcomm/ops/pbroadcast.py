"""pbroadcast: every rank gets one rank's array (native name: broadcast)."""

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
from jaxcomm._primitive import define, in_wider_type
from jaxcomm._typing import AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call
from jaxcomm.ops.psum import all_reduce_p


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
    root = _check.rank(op, "source", source, lax.axis_size(axes))

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
        _check.element_type(op, leaf)
        return broadcast_p.bind(_compat.make_varying(leaf, axes), *after, call=call, source=root)

    return bind


def _attributes(x, n, *, source):
    return {"root": np.int64(source)}


def _transpose(ct, x, *, call, source):
    # The source gets the sum of all ranks' cotangents.
    total = in_wider_type(
        lambda wide: _pending.complete(all_reduce_p, wide, call=call, reduce_op=ReduceOp.SUM),
        _compat.make_varying(ct, call.axes),
    )
    chosen = jnp.where(lax.axis_index(call.axes) == source, total, jnp.zeros_like(total))
    return _compat.make_varying(chosen, call.axes)  # jnp.where drops the condition if the array is empty


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
    # XLA has no broadcast on CPU. A sum of bits that are zero on all other ranks keeps the sign of zeros.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_xla(x.real, call=call, source=source), _xla(x.imag, call=call, source=source))
    sent = x.astype(np.uint8) if x.dtype == np.bool_ else x
    bits = lax.bitcast_convert_type(sent, f"uint{8 * sent.dtype.itemsize}")
    is_source = lax.axis_index(call.axes) == source
    total = lax.psum(jnp.where(is_source, bits, jnp.zeros_like(bits)), call.axes)
    return lax.bitcast_convert_type(total, sent.dtype).astype(x.dtype)


broadcast_p = define(
    "broadcast",
    attributes=_attributes,
    transpose=_transpose,
    batch_named=_batch_named,
    xla=_xla,
)
