"""The public functions of collective matmul: arguments, checks, documentation."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat
from jaxcomm._lowering import Call
from jaxcomm._typing import AxisIndexGroups, AxisName
from jaxcomm.matmul.loops import ALGORITHMS, Spec
from jaxcomm.matmul.primitives import gather_p, scatter_p


def all_gather_matmul(
    x: Any,
    w: Any | Sequence[Any],
    axis_name: AxisName,
    *,
    axis: int = 0,
    axis_index_groups: AxisIndexGroups | None = None,
    algorithm: str | None = None,
    max_sms: int | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Multiplies the rows of all ranks by this rank's weights: ``all_gather(x, axis, tiled=True) @ w``.

    Args:
      x: this rank's rows, (..., m, ..., k), of the same shape and dtype on every rank.
      w: weights, (k, f), or a tuple of weights, which share the transfers of x. Ranks may have different weights.
      axis_name: mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group.
      axis: position of m; any dimension of x but the last. Negative values count from the end.
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
      algorithm: "unfused", "ring", or "xla" for XLA's own all-gather. None lets jaxcomm choose.
      max_sms: the most multiprocessors of a GPU that each transfer occupies.
      precision: precision of the products, as in jax.lax.dot_general, also in derivatives.
      preferred_element_type: element type of the result, as in jax.lax.dot_general.

    Returns:
      (..., n * m, ..., f); a tuple of them if w is a tuple.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: invalid shapes, axis, groups or algorithm (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: (n - 1) * m * k elements sent per rank; n - 1 messages with "ring". The derivative for
      x sends as much, and so does that for w, which gathers x again.
    Source: Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959.
    """
    op = "all_gather_matmul"
    call = _call(op, axis_name, axis_index_groups, algorithm, max_sms)
    weights = list(w) if isinstance(w, tuple | list) else [w]
    if not weights:
        raise ValueError(f"{op}: w must be an array or a tuple of at least one array, got {w!r}")
    x, weights, dtypes, precision = _operands(op, call, x, weights, precision, preferred_element_type)
    dimension = _row_dimension(op, "axis", axis, x)
    products = gather_p.bind(
        x,
        *weights,
        spec=Spec(call, dimension, 0, precision),
        num_weights=len(weights),
        dtypes=dtypes,
    )
    return tuple(products) if isinstance(w, tuple | list) else products[0]


def matmul_psum_scatter(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups | None = None,
    algorithm: str | None = None,
    max_sms: int | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Sums products over the ranks; rank r gets block r of the rows: ``psum_scatter(x @ w, tiled=True)``.

    Args:
      x: (..., n * m, ..., k), of the same shape and dtype on every rank.
      w: weights, (k, f). Ranks may have different weights.
      axis_name: mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group.
      scatter_dimension: position of n * m; any dimension of x but the last. Negative values count from the end.
      axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
      algorithm: "unfused", "ring", or "xla" for XLA's own reduce-scatter. None lets jaxcomm choose.
      max_sms: the most multiprocessors of a GPU that each transfer occupies.
      precision: precision of the products, as in jax.lax.dot_general, also in derivatives.
      preferred_element_type: element type of the result and of the parts that ranks send.

    Returns:
      (..., m, ..., f). "ring" adds the parts of ranks r + 1, r + 2, ..., r in this order. 8- and 16-bit floats are
      added in f32; "ring" rounds once per rank.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map or vmap.
      ValueError: invalid shapes, dimension, groups or algorithm (when tracing).
      TypeError: a tracer in place of a static value, or an unsupported element type (when tracing).
      jax.errors.JaxRuntimeError: a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ (at
        run time).

    Cost: (n - 1) * m * f elements sent per rank; n - 1 messages with "ring". The derivatives for
      x and w together send as much: each block of the cotangent is used for both when it arrives.
    Source: Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959.
    """
    op = "matmul_psum_scatter"
    call = _call(op, axis_name, axis_index_groups, algorithm, max_sms)
    if isinstance(w, tuple | list):
        raise TypeError(f"{op}: w must be one array, got {len(w)}; only all_gather_matmul takes several weights")
    x, weights, (dtype,), precision = _operands(op, call, x, [w], precision, preferred_element_type)
    dimension = _row_dimension(op, "scatter_dimension", scatter_dimension, x)
    n = _check.group_size(call.axes, call.groups)
    _check.divisible(op, "scatter_dimension", dimension, x.shape, n, call.axes)
    return scatter_p.bind(x, *weights, spec=Spec(call, dimension, 0, precision), dtype=dtype)[0]


def _call(op: str, axis_name: Any, axis_index_groups: Any, algorithm: str | None, max_sms: int | None) -> Call:
    axes = _check.axes(op, axis_name)
    if not axes:
        raise ValueError(f"{op}: axis_name must name at least one mesh axis, got {axis_name!r}")
    groups = _check.groups(op, axis_index_groups, axes)
    if algorithm not in (None, *ALGORITHMS, "xla"):
        raise ValueError(f"{op}: unknown algorithm {algorithm!r}; pass one of {', '.join(ALGORITHMS)}, xla")
    return Call(op, axes, groups, algorithm, _check.max_sms(op, max_sms), _check.call_site())


def _operands(op: str, call: Call, x: Any, weights: list[Any], precision: Any, preferred: Any) -> tuple[Any, ...]:
    """Checks the arrays. Returns them in one element type and as varying over the same axes.

    Returns:
      x, weights, element types of the products, precision.
    """
    x, weights = jnp.asarray(x), [jnp.asarray(w) for w in weights]
    if x.ndim < 2:
        raise ValueError(f"{op}: x must have rows and columns, got shape {x.shape}")
    for w in weights:
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{op}: w must have the shape (k, f), where k = {x.shape[-1]} is the last dimension of x, which has "
                f"the shape {x.shape}; got {w.shape}"
            )
    for array in (x, *weights):
        _check.element_type(op, array)
        if array.dtype == np.bool_:
            raise TypeError(f"{op}: an operand has element type bool, which can't be summed; convert it to an integer")
    dtype = jnp.result_type(x, *weights)
    x, weights = x.astype(dtype), [w.astype(dtype) for w in weights]
    if precision is None:  # lowering happens outside of a user's jax.default_matmul_precision
        settings: Any = jax.config
        precision = settings.jax_default_matmul_precision
    precision = tuple(precision) if isinstance(precision, list) else precision

    def product(x: Any, w: Any) -> Any:
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        return lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=preferred)

    dtypes = tuple(jax.eval_shape(product, x, w).dtype for w in weights)
    axes = frozenset(call.axes).union(*(_compat.varying_axes(a) for a in (x, *weights)))
    x, *weights = (_compat.make_varying(a, tuple(axes)) for a in (x, *weights))
    return x, weights, dtypes, precision


def _row_dimension(op: str, name: str, value: Any, x: Any) -> int:
    dimension = _check.dimension(op, name, value, x.ndim)
    if dimension == x.ndim - 1:
        raise ValueError(f"{op}: {name}={value} is the last dimension of x, which the product contracts; name another")
    return dimension
