"""ppermute: every rank sends its array to at most one rank (native name: permute)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import define, make_call
from jaxcomm._typing import AxisName, PyTree


def ppermute(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> PyTree:
    """Sends x along the given (source, destination) pairs; ranks that receive nothing get zeros.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank.
      axis_name: mesh axis, or tuple of axes, outermost first.
      perm: static list of (source, destination) ranks; each rank at most once as source and once as destination.
      algorithm: a name from ``algorithms("ppermute")``, or "xla" for XLA's own collective. None lets
        the selection table choose.
      max_sms: the most multiprocessors of a GPU that the call occupies; None means JAXCOMM_MAX_SMS. See jaxcomm.ops.

    Returns:
      Arrays of the shapes of x.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: perm has a rank out of range, or a source or destination twice; unknown algorithm (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: one message of the size of x per rank.
    """
    op = "ppermute"
    call = make_call(op, "permute", _check.axes(op, axis_name), None, algorithm, max_sms)
    return jax.tree.map(_transfer(call, perm), jax.tree.map(jax.numpy.asarray, x))


def ppermute_start(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    algorithm: str | None = None,
    max_sms: int | None = None,
    after: PyTree = (),
) -> Pending:
    """Starts a ppermute. Computations can run beside the transfer until ``done()`` of the result.

    Arguments, errors and cost are those of ppermute. See docs/guide/overlap.md.

    Args:
      after: pytree of arrays that have been computed before the transfer starts.

    Returns:
      A Pending. ``done()`` returns the same bits as ppermute.
    """
    op = "ppermute_start"
    call = make_call(op, "permute", _check.axes(op, axis_name), None, algorithm, max_sms, asynchronous=True)
    return _pending.start(call, _transfer(call, perm), jax.tree.map(jax.numpy.asarray, x), after)


def _transfer(call: Call, perm: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes = call.op, call.axes
    _check.static(op, "perm", perm)
    try:
        rows = [tuple(pair) for pair in perm]
    except TypeError as error:
        raise TypeError(f"{op}: perm must be a list of (source, destination) pairs, got {perm!r}") from error
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"{op}: perm must be a list of (source, destination) pairs, got {rows}")
    pairs = tuple((_check.integer(op, "perm", s), _check.integer(op, "perm", d)) for s, d in rows)
    n = lax.axis_size(axes)
    for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{op}: perm must have each {what} at most once, got {what}s {ranks}")
        if any(not 0 <= r < n for r in ranks):
            raise ValueError(f"{op}: perm must have {what}s from 0 to {n - 1}, got {ranks}")

    def bind(leaf, *after):
        _check.element_type(op, leaf)
        return permute_p.bind(_compat.make_varying(leaf, axes), *after, call=call, perm=pairs)

    return bind


def _shape(x, *, call, perm):
    return x


def _attributes(x, n, *, perm):
    source_of = np.full(n, -1, np.int64)
    for source, destination in perm:
        source_of[destination] = source
    return {"source_of": source_of}


def _transpose(ct, x, *, call, perm):
    return _pending.whole(permute_p, ct, call=call, perm=tuple((d, s) for s, d in perm))


def _batch(bind, x, d, *, call, perm):
    return bind(x, call=call, perm=perm), d


def _batch_named(bind, axis_data, x, d, *, call, perm):
    if len(call.axes) > 1:
        raise NotImplementedError(f"{call.op}: an axis of vmap can't be combined with further axes, got {call.axes}")
    if d is None:
        x, d = lax.broadcast(x, (axis_data.size,)), 0
    rows = [jax.numpy.zeros_like(lax.index_in_dim(x, 0, d))] * axis_data.size
    for source, destination in perm:
        rows[destination] = lax.index_in_dim(x, source, d)
    return lax.concatenate(rows, d), d


def _xla(x, *, call, perm):
    # jax.lax numbers ranks in the order of the mesh axes, or rejects another order of axes.
    in_mesh = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in call.axes)
    sizes = {a: lax.axis_size(a) for a in in_mesh}

    def renumber(rank):
        where = dict(zip(call.axes, np.unravel_index(rank, [sizes[a] for a in call.axes]), strict=True))
        return int(np.ravel_multi_index([where[a] for a in in_mesh], list(sizes.values())))

    return lax.ppermute(x, in_mesh, [(renumber(s), renumber(d)) for s, d in perm])


permute_p = define(
    "permute",
    shape=_shape,
    attributes=_attributes,
    transpose=_transpose,
    batch=_batch,
    batch_named=_batch_named,
    xla=_xla,
    alone=None,  # an empty perm gives zeros
)
