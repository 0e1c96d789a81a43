"""ppermute: every rank sends its array to at most one rank (native name: permute)."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _pending
from jaxcomm._lowering import Call
from jaxcomm._pending import Pending
from jaxcomm._primitive import define, one_axis
from jaxcomm._typing import AxisName, PyTree
from jaxcomm.ops._shared import Options, StartOptions, collective, make_call


@collective()
def ppermute(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    **options: Unpack[Options],
) -> PyTree:
    """Sends x along the given (source, destination) pairs; ranks that receive nothing get zeros.

    Args:
      x: pytree of arrays with the same shapes and dtypes on every rank.
      perm: static list of (source, destination) ranks; each rank at most once as source and once as destination.

    Returns:
      Arrays of the shapes of x.

    Raises:
      ValueError: perm has a rank out of range, or a source or destination twice; unknown algorithm (when tracing).

    Cost: one message of the size of x per rank.
    """
    call = make_call("ppermute", "permute", axis_name, None, options)
    return jax.tree.map(_transfer(call, perm), x)


@collective(like=ppermute)
def ppermute_start(
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    **options: Unpack[StartOptions],
) -> Pending:
    """Starts a ppermute; ``done()`` of the result ends it."""
    call = make_call("ppermute_start", "permute", axis_name, None, options)
    return _pending.start(call, _transfer(call, perm), x, options)


def _transfer(call: Call, perm: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    """Checks the arguments and returns the transfer of one array."""
    op, axes = call.op, call.axes
    pairs = _check.permutation(op, perm, lax.axis_size(axes))

    def bind(leaf, *after):
        leaf = jnp.asarray(leaf)
        _check.element_type(op, leaf)
        return permute_p.bind(_compat.make_varying(leaf, axes), *after, call=call, perm=pairs)

    return bind


def _attributes(x, n, *, perm):
    source_of = np.full(n, -1, np.int64)
    for source, destination in perm:
        source_of[destination] = source
    return {"source_of": source_of}


def _transpose(ct, x, *, call, perm):
    return _pending.complete(permute_p, ct, call=call, perm=tuple((d, s) for s, d in perm))


def _batch_named(bind, axis_data, x, d, *, call, perm):
    one_axis(call)
    if d is None:
        x, d = lax.broadcast(x, (axis_data.size,)), 0
    rows = [jnp.zeros_like(lax.index_in_dim(x, 0, d))] * axis_data.size
    for source, destination in perm:
        rows[destination] = lax.index_in_dim(x, source, d)
    return lax.concatenate(rows, d), d


def lax_ppermute(x: Any, call: Call, perm: Sequence[tuple[int, int]]) -> Any:
    """jax.lax.ppermute, which numbers ranks in the order of the mesh axes, or rejects another order of axes."""
    in_mesh = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in call.axes)
    sizes = {a: lax.axis_size(a) for a in in_mesh}

    def renumber(rank):
        where = dict(zip(call.axes, np.unravel_index(rank, [sizes[a] for a in call.axes]), strict=True))
        return int(np.ravel_multi_index([where[a] for a in in_mesh], list(sizes.values())))

    return lax.ppermute(x, in_mesh, [(renumber(s), renumber(d)) for s, d in perm])


permute_p = define(
    "permute",
    attributes=_attributes,
    transpose=_transpose,
    batch_named=_batch_named,
    xla=lambda x, *, call, perm: lax_ppermute(x, call, perm),
    alone=None,  # an empty perm gives zeros
)
