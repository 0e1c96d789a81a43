"""register() and define() create primitives and their rules."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _compat, _lowering, _xla_hierarchical
from jaxcomm._dtypes import to_reduce
from jaxcomm._lowering import Call


def contiguous_count(shape: Sequence[int], dimension: int) -> int:
    """Number of elements of a block that stay contiguous when blocks are joined along `dimension`."""
    return int(np.prod(shape[dimension:], dtype=np.int64))


def shift(dimension: int, batch_dimension: int) -> int:
    """Index of `dimension` after a batch dimension has been inserted."""
    return dimension + (batch_dimension <= dimension)


def in_wider_type(reduce: Callable[[Any], Any], x: Any) -> Any:
    """Reduces x. If the executors can't reduce its type, x is converted to a wider type and the result back."""
    wider = to_reduce(x.dtype)
    return reduce(x) if wider == x.dtype else reduce(x.astype(wider)).astype(x.dtype)


def one_axis(call: Call) -> None:
    """Raises if an axis of vmap is one of several axes of a call."""
    if len(call.axes) > 1:
        raise NotImplementedError(f"{call.op}: an axis of vmap can't be combined with further axes, got {call.axes}")


def rank_in_group(call: Call) -> Any:
    index = lax.axis_index(call.axes)
    if call.groups is None:
        return index
    order = [rank for group in call.groups for rank in group]
    return jnp.array(np.argsort(order) % len(call.groups[0]), jnp.int32)[index]


def reshape_alone(x: Any, shape: tuple) -> Any:
    """The result in a group of one rank: the operand."""
    return x.reshape(shape)


def _transpose_rule(transpose, cotangent, x, *after, call: Call, **params):
    rest = [_compat.ad.Zero(a.aval) if _compat.ad.is_undefined_primal(a) else None for a in after]
    return [transpose(cotangent, x.aval, call=call, **params), *rest]


def _no_derivative(primals, tangents, *, call: Call, **params):
    raise NotImplementedError(f"{call.op} at {call.site} has no derivative; apply jax.lax.stop_gradient to its operand")


_tokens = itertools.count(1)


class _Primitive(_compat.Primitive):
    """Each equation of an asynchronous call has a token of its own, also where JAX makes it from another equation."""

    def bind(self, *args: Any, **params: Any) -> Any:
        call = params.get("call")
        if call is not None and call.asynchronous:
            params["call"] = dataclasses.replace(call, token=next(_tokens))
        return super().bind(*args, **params)


def register(
    name: str,
    *,
    shape: Callable[..., Any],
    lower: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
    multiple_results: bool = False,
) -> _compat.Primitive:
    """Returns the primitive jaxcomm_<name> with these rules of JAX; `lower` as in _lowering.register_rule."""
    primitive = _Primitive(f"jaxcomm_{name}")
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(shape)
    _lowering.register_rule(primitive, lower)
    for rules, rule in (
        (_compat.ad.primitive_jvps, jvp),
        (_compat.ad.primitive_transposes, transpose),
        (_compat.batching.fancy_primitive_batchers, batch),
    ):
        if rule is not None:
            rules[primitive] = rule
    return primitive


def define(
    name: str,
    *,
    attributes: Callable[..., dict[str, Any]],
    batch_named: Callable[..., Any],
    xla: Callable[..., Any],
    shape: Callable[..., Any] = lambda x, **params: x,
    transpose: Callable[..., Any] | None = None,
    batch: Callable[..., Any] = lambda bind, x, d, **params: (bind(x, **params), d),
    alone: Callable[..., Any] | None = reshape_alone,
    onto_zeros: Callable[..., bool] = lambda **params: False,
) -> _compat.Primitive:
    """Returns a primitive of one operand and one result. Its parameters are `call` (a Call) and those of the rules.

    Further operands only delay the collective until they have been computed. Derivatives do not wait for them: they
    would be saved for the backward pass.

    Args:
      name: native name of the collective; the primitive and the FFI target are jaxcomm_<name>.
      attributes: attributes of the custom call, (x on one device, group size, **params) -> dict.
      batch_named: vmap over one of the named axes, (bind, axis_data, x, dimension, call, **params) -> (y, dimension or
        None). Calls with groups raise before.
      xla: the same computation with a collective of jax.lax, (x, call, **params) -> y.
      shape: abstract evaluation, (aval, call, **params) -> aval; by default, the result has the type of the operand.
      transpose: argument of set_transpose; None if the op has no derivative, or if set_transpose is called later.
      batch: vmap over a dimension, (bind, x, dimension, call, **params) -> (y, dimension); bind is primitive.bind.
      alone: the computation in a group of one rank, (x, shape) -> y; None calls the FFI target there too.
      onto_zeros: (**params) -> whether the call writes some elements of the result only. The others are zero.
    """

    composition = _xla_hierarchical.COMPOSITIONS.get(name)

    def abstract_eval(x, *after, call: Call, **params):
        return shape(x, call=call, **params)

    def lower(ctx, x, *after, platform: str, call: Call, **params):
        return _lowering.lower(
            ctx,
            x,
            *after,
            platform=platform,
            call=call,
            target=f"jaxcomm_{name}",
            attributes=lambda x, n: attributes(x, n, **params),
            alone=alone,
            xla=lambda x: [xla(x, call=call, **params)],
            composed=composition and (lambda x, levels: [composition(x, levels, **params)]),
            num_after=len(after),
            onto_zeros=onto_zeros(**params),
        )

    def batch_rule(axis_data, args, dimensions, *, call: Call, **params):
        (x, *after), (d, *_) = args, dimensions

        def bind(x, **params):
            return primitive.bind(x, *after, **params)

        if axis_data.name in call.axes:
            if call.groups is not None:
                raise NotImplementedError(f"{call.op}: an axis of vmap can't be combined with axis_index_groups")
            return batch_named(bind, axis_data, x, d, call=call, **params)
        if d is None:
            return bind(x, call=call, **params), None
        return batch(bind, x, d, call=call, **params)

    primitive = register(name, shape=abstract_eval, lower=lower, jvp=_no_derivative, batch=batch_rule)
    if transpose is not None:
        set_transpose(primitive, transpose)
    return primitive


def set_transpose(primitive: _compat.Primitive, transpose: Callable[..., Any]) -> None:
    """Gives a primitive of define() its derivative.

    Args:
      primitive: linear in its first operand.
      transpose: (cotangent, aval, call, **params) -> cotangent of x.
    """

    def jvp(primals, tangents, *, call: Call, **params):
        y = primitive.bind(*primals, call=call, **params)
        if type(tangents[0]) is _compat.ad.Zero:
            return y, _compat.zero_tangent(y)
        return y, primitive.bind(tangents[0], call=call, **params)

    _compat.ad.deflinear2(primitive, functools.partial(_transpose_rule, transpose))
    _compat.ad.primitive_jvps[primitive] = jvp
