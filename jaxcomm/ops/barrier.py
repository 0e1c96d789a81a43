"""barrier: no rank continues before all ranks of the group have arrived."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _check, _compat, _lowering
from jaxcomm._primitive import register
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree
from jaxcomm.ops._shared import Options, collective, make_call


@collective()
def barrier(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[Options],
) -> PyTree:
    """Returns x after every rank of the group has reached this call.

    A barrier orders only computations that depend on its result: pass the arrays that must wait through it.

    Args:
      x: pytree of arrays of any shapes and dtypes. They may differ between ranks.

    Returns:
      x, unchanged and not copied.

    Raises:
      ValueError: invalid groups or algorithm, or x has no arrays (when tracing).

    Cost: dissemination, ceil(log2 n) signals per rank; n is the number of ranks in a group.
    Source: Hensgen, Finkel, Manber, Int. J. Parallel Programming 17(1), 1988, doi 10.1007/BF01379320.
    """
    op = "barrier"
    call = make_call(op, op, axis_name, axis_index_groups, options)
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        raise ValueError(f"{op}: x has no arrays; pass the arrays that must wait for the barrier")
    for leaf in leaves:
        _check.element_type(op, leaf)
    leaves = [_compat.make_varying(jnp.asarray(leaf), call.axes) for leaf in leaves]
    return jax.tree.unflatten(tree, barrier_p.bind(*leaves, call=call))


def _lower(ctx, *xs, platform, call):
    return _lowering.lower(
        ctx,
        *xs,
        platform=platform,
        call=call,
        target="jaxcomm_barrier",
        attributes=lambda x, n: {},
        alone=lambda x, shape: x,
        xla=lambda *xs: _xla(xs, call),
        aliases={i: i for i in range(len(xs))},
    )


def _xla(xs, call):
    # XLA orders only computations that depend on each other, and drops unused ones. So the sum depends on all operands
    # and the results depend on the sum, in ways that XLA cannot simplify.
    own = lax.axis_index(call.axes) + sum(x.reshape(-1)[:1].astype(bool).sum(dtype=jnp.int32) for x in xs)
    total = lax.psum(own, call.axes) if call.groups is None else _compat.psum_of_groups(own, call.axes, call.groups)
    return [jnp.where(total & 1 <= 1, x, jnp.zeros_like(x)) for x in xs]


def _jvp(primals, tangents, *, call):
    return barrier_p.bind(*primals, call=call), list(tangents)


def _batch(axis_data, args, dims, *, call):
    axes = tuple(a for a in call.axes if a != axis_data.name)
    if axes != call.axes and call.groups is not None:
        raise NotImplementedError(f"{call.op}: an axis of vmap can't be combined with axis_index_groups")
    return (barrier_p.bind(*args, call=call.over(axes)) if axes else args), dims


# _primitive.define takes one operand and one result; a barrier has several. The derivative needs no barrier.
barrier_p = register(
    "barrier", shape=lambda *xs, call: list(xs), lower=_lower, jvp=_jvp, batch=_batch, multiple_results=True
)
