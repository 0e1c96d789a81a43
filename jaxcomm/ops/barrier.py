"""barrier: no rank continues before all ranks of the group have arrived."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _check, _compat, _lowering
from jaxcomm._primitive import make_call, register
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree


def barrier(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> PyTree:
    """Returns x after every rank of the group has reached this call.

    A barrier orders only computations that depend on its result: pass the arrays that must wait through it.

    Args:
      x: pytree of arrays of any shapes and dtypes. They may differ between ranks.
      axis_name: mesh axis, or tuple of axes, outermost first. Several axes declare a hierarchy: the innermost axis
        stays inside a node.
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
      algorithm: a name from ``algorithms("barrier")``, or "xla" for XLA's own collective. None lets
        the selection table choose.
      max_sms: the most multiprocessors of a GPU that the call occupies; None means JAXCOMM_MAX_SMS. See jaxcomm.ops.

    Returns:
      x, unchanged and not copied.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: invalid groups or algorithm, or x has no arrays (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: dissemination, ceil(log2 n) signals per rank; n is the number of ranks in a group.
    Source: Hensgen, Finkel, Manber, Int. J. Parallel Programming 17(1), 1988, doi 10.1007/BF01379320.
    """
    op = "barrier"
    call = make_call(op, op, _check.axes(op, axis_name), axis_index_groups, algorithm, max_sms)
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
