"""dispatch() and combine(): pytrees of rows, to the ranks of the experts and back."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _check
from jaxcomm._typing import PyTree
from jaxcomm.moe import primitives
from jaxcomm.moe.routing import Routing
from jaxcomm.moe.row_assignment import FIELDS


def dispatch(
    x: PyTree, routing: Routing, *, per_choice: bool = False, algorithm: str | None = None, max_sms: int | None = None
) -> PyTree:
    """Sends the row of every token to the ranks of its experts.

    Args:
      x: pytree of (T, ...) arrays, or (T, K, ...) per choice. All leaves travel in one exchange.
      routing: result of route().
      per_choice: each choice has a row of its own.
      algorithm: "direct", "hierarchical" (one row per token and node crosses between nodes; the default between
        hosts of CPUs), or "xla" for XLA's own ragged_all_to_all. Between hosts of GPUs, "hierarchical" needs GIN, and
        is the default if the self-test has passed there; otherwise "xla" is (docs/internals/cuda-moe.md).
      max_sms: the most multiprocessors of a GPU that the call occupies; None means JAXCOMM_MAX_SMS.

    Returns:
      pytree of (C, ...) arrays, in groups by expert. Group m has the rows of local expert m. Rows in and after the
      groups that belong to no choice are zero.

    Raises:
      ValueError: invalid shapes or algorithm (when tracing).
      TypeError: the gradient of a float of 8 bits is asked for, or a wrong argument (when tracing).
      NotImplementedError: the axis or the routing belongs to vmap.
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, calls of ranks differ, or
        GPUs of several nodes have no GIN for "hierarchical" (at run time).

    Cost: one row per choice whose expert is on another rank. On GPUs of one node, one per token and such rank.
    "hierarchical": one row per token and other node between nodes, and one row per choice inside them.
    """
    op = "moe.dispatch"
    call = _call(op, routing, algorithm, max_sms)
    lead = routing.slot.shape if per_choice else routing.slot.shape[:1]
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        raise ValueError(f"{op}: x has no arrays")
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        _check.element_type(op, leaf)
        if leaf.shape[: len(lead)] != lead:
            raise ValueError(f"{op}: leaves of x must have shape {_show(lead)}, got {leaf.shape}")
    ends = [leaf.shape[len(lead) :] for leaf in leaves]
    flat = [leaf.reshape(math.prod(lead), math.prod(end)) for leaf, end in zip(leaves, ends, strict=True)]
    rows = primitives.dispatch(flat, routing.assignment(), call, per_choice)
    return jax.tree.unflatten(tree, [r.reshape(len(r), *end) for r, end in zip(rows, ends, strict=True)])


def combine(
    rows: PyTree,
    routing: Routing,
    weights: Any | None = None,
    *,
    per_choice: bool = False,
    algorithm: str | None = None,
    max_sms: int | None = None,
) -> PyTree:
    """Returns the rows of every token home and adds them, each times its weight.

    Floats of up to 32 bits are added in float32. See `reduce` of route() for the order.

    Args:
      rows: pytree of (C, ...) arrays, as dispatch() returns them.
      routing: the result of route() that was passed to dispatch().
      weights: (T, K), at the rank of the tokens; None means ones.
      per_choice: return the rows of all choices instead of their sum. It takes no weights.
      algorithm, max_sms: as in dispatch().

    Returns:
      pytree of (T, ...) arrays, or (T, K, ...) per choice, with the element types of `rows`. A choice without a row
      counts as zero.

    Raises:
      ValueError: invalid shapes or algorithm, or weights per choice (when tracing).
      TypeError: weights of integers, or for rows of integers (when tracing).
      NotImplementedError: the axis or the routing belongs to vmap.
      jax.errors.JaxRuntimeError: as dispatch() (at run time).

    Cost: one row per choice whose expert is on another rank. "hierarchical": between nodes, one row per token and other
    node, or one per choice with reduce="home" and per_choice.
    """
    op = "moe.combine"
    call = _call(op, routing, algorithm, max_sms)
    leaves, tree = jax.tree.flatten(rows)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    if weights is not None:
        weights = jnp.asarray(weights)
        _check_weights(op, weights, leaves, routing, per_choice)
    results = []
    for leaf in leaves:
        _check.element_type(op, leaf)
        if leaf.shape[:1] != (routing.capacity,):
            raise ValueError(f"{op}: leaves of rows must have shape {_show((routing.capacity,))}, got {leaf.shape}")
        end = leaf.shape[1:]
        y = primitives.combine(leaf.reshape(len(leaf), math.prod(end)), weights, routing.assignment(), call, per_choice)
        lead = routing.slot.shape if per_choice else routing.slot.shape[:1]
        results.append(y.reshape(*lead, *end))
    return jax.tree.unflatten(tree, results)


def _check_weights(op, weights, leaves, routing, per_choice):
    if per_choice:
        raise ValueError(f"{op}: weights cannot be combined with per_choice; multiply the result")
    if weights.shape != routing.slot.shape:
        raise ValueError(f"{op}: weights must have shape {routing.slot.shape}, got {weights.shape}")
    for name, array in (("weights", weights), *(("rows", leaf) for leaf in leaves)):
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(f"{op}: {name} must have floats if there are weights, got element type {array.dtype}")
    for leaf in leaves:
        if jnp.issubdtype(weights.dtype, jnp.complexfloating) and not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(f"{op}: weights are complex, but rows have element type {leaf.dtype}")


def _show(lead):
    return "(" + ", ".join(map(str, lead)) + ", ...)"


def _call(op, routing, algorithm, max_sms):
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be the result of jaxcomm.moe.route, got {type(routing).__name__}")
    _check.axes(op, routing.call.axes)
    for name in FIELDS:
        dtype = jnp.asarray(getattr(routing, name)).dtype
        if dtype != jnp.int32:
            raise TypeError(f"{op} at {_check.call_site()}: routing.{name} must have int32, got element type {dtype}")
    _check.algorithm(op, op.removeprefix("moe."), algorithm)
    return dataclasses.replace(
        routing.call, op=op, algorithm=algorithm, max_sms=_check.max_sms(op, max_sms), site=_check.call_site()
    )
