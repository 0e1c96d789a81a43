"""Pending: a transfer that has been started. The primitive done_p ends it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _check, _compat, _lowering
from jaxcomm._lowering import Call
from jaxcomm._typing import PyTree


@dataclasses.dataclass(frozen=True)
class Pending:
    """A collective that has been started; ``done()`` returns its result.

    A Pending is a pytree of arrays. It may be returned from functions, and be part of a carry of ``jax.lax.scan``. The
    transfer is complete at the end of the computation that started it: of the program, the iteration of a loop or the
    branch of ``jax.lax.cond``. This holds even if ``done()`` is never called.

    Attributes:
      op: public name of the start function.
    """

    op: str
    _results: PyTree
    _operands: PyTree  # of the transfers; None in place of a leaf that needs none
    _call: Call  # arguments of the start function, without its call site
    # Arrays that the transfers wait for. They are operands of the calls, so done must name them too: otherwise, XLA
    # reuses their memory for the computations beside the transfer, which then wait for its end. They are no leaves, so
    # that branches and iterations may differ in them. Flattening (a jit that returns this, tree.map, a loop's carry)
    # therefore loses them.
    _after: tuple[Any, ...] = ()

    def done(self, after: PyTree = ()) -> PyTree:
        """Returns the result of the transfer: the same bits as those of the synchronous op.

        Calls of ``done()`` have no effects. A second call returns the same result, and an unused one is removed.

        Args:
          after: pytree of arrays that have been computed before the transfer ends. XLA keeps the memory of the transfer
            apart from that of their computations, so these can run beside the transfer. The arrays of ``start(after=)``
            are included, unless this object was returned by ``jax.jit``, mapped by ``jax.tree.map`` or carried by a
            loop: name them here then.

        Raises:
          TypeError: `after` has a leaf that is not an array (when tracing).
        """
        values = ordering(f"{self.op}(...).done", after)

        def one(result: Any, operand: Any) -> Any:
            if operand is None or not _compat.is_tracer(result):
                return result
            return done_p.bind(result, operand, *self._after, *values, call=self._call)

        return jax.tree.map(one, self._results, self._operands)


_LEAVES = ("_results", "_operands")


def _unflatten(given: tuple[str, Call], children: Any) -> Pending:
    results, operands = children
    return Pending(given[0], results, operands, given[1])


jax.tree_util.register_pytree_with_keys(
    Pending,
    lambda pending: (
        [(jax.tree_util.GetAttrKey(name), getattr(pending, name)) for name in _LEAVES],
        (pending.op, pending._call),
    ),
    _unflatten,
)


def ordering(op: str, after: PyTree) -> list[Any]:
    """Checks the argument `after` and returns its arrays, without constants."""

    def array(leaf: Any) -> Any:
        try:
            value = jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{op}: after must be a pytree of arrays, got {leaf!r}") from error
        _check.element_type(op, value, name="after")
        return value

    return [value for value in map(array, jax.tree.leaves(after)) if _compat.is_tracer(value)]


def start(call: Call, transfer: Callable[..., Any], x: PyTree, options: Mapping[str, Any]) -> Pending:
    """Starts a transfer.

    Args:
      call: arguments of the op; asynchronous.
      transfer: (leaf of x, *arrays of after) -> result.
      x: operand of the op.
      options: keywords of the op; `after` is not yet checked.
    """
    values = ordering(call.op, options.get("after", ()))
    results = jax.tree.map(lambda leaf: transfer(leaf, *values), x)
    # XLA runs groups of unequal sizes.
    alone = not call.axes or not _check.equal_sizes(call.groups) or _check.group_size(call.axes, call.groups) == 1
    operands = jax.tree.map(lambda leaf: None if alone else jnp.asarray(leaf), x)
    return Pending(call.op, results, operands, dataclasses.replace(call, site="", token=0), tuple(values))


def complete(primitive: _compat.Primitive, x: Any, *, call: Call, **params: Any) -> Any:
    """Runs a transfer, the transpose of the call's own, to its end and returns the result.

    If its collective lacks the algorithm of the call, the selection table chooses another one.
    """
    own = call
    if not _check.has_algorithm(primitive.name.removeprefix("jaxcomm_"), call.algorithm):
        own = dataclasses.replace(call, algorithm=None)
    y = primitive.bind(x, call=own, **params)
    return done_p.bind(y, x, call=call) if call.asynchronous else y


# Operands: result and operand of the transfer, then the values that start and done wait for. The result is the first
# operand. The derivative does not wait for the values: they would be saved for the backward pass.


def _jvp(primals: Any, tangents: Any, *, call: Call) -> Any:
    result, operand, *_ = tangents
    y = done_p.bind(*primals, call=call)
    if type(result) is _compat.ad.Zero:
        return y, _compat.zero_tangent(y)
    named = [] if type(operand) is _compat.ad.Zero else [operand]
    return y, done_p.bind(result, *named, call=call)


def _transpose(ct: Any, *operands: Any, call: Call) -> Any:
    undefined = [_compat.ad.is_undefined_primal(x) for x in operands]
    zeros = [_compat.ad.Zero(x.aval) if u else None for x, u in zip(operands, undefined, strict=True)]
    return [ct if undefined[0] else None, *zeros[1:]]


def _batch(axis_data: Any, args: Any, dims: Any, *, call: Call) -> Any:
    rest = tuple(axis for axis in call.axes if axis != axis_data.name)  # those of the transfer
    return done_p.bind(*args, call=call.over(rest)) if rest else args[0], dims[0]


done_p = _compat.Primitive("jaxcomm_done")
done_p.def_abstract_eval(lambda result, *kept, call: result)
_lowering.register_rule(done_p, _lowering.lower_done)
_compat.ad.primitive_jvps[done_p] = _jvp
_compat.ad.primitive_transposes[done_p] = _transpose
_compat.batching.fancy_primitive_batchers[done_p] = _batch
