"""The check of a count matrix at run time. All ranks have the same matrix, so all raise or none.

On GPUs, the kernel of dispatch and combine makes the check, because Python learns of an error in the next call only.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxcomm import _compat, _lowering
from jaxcomm._primitive import register


def check(table, *, call, capacity, raises):
    """Returns `table`, (n, E + 1), or raises. Its last column counts ids of unknown experts."""
    return check_p.bind(table, call=call, capacity=capacity, raises=raises)


def refuse_unchecked(call):
    """Raises for a call whose overflow nothing would detect."""
    raise NotImplementedError(
        f"{call.op} at {call.site}: on_overflow='raise' works on CPUs, and on GPUs with jaxcomm's own dispatch and "
        "combine (between nodes algorithm='hierarchical'); pass on_overflow='drop' and look at Routing.dropped"
    )


def _mark(table, *, call, capacity):
    """Sizes by which the kernel recognizes what it cannot see in the table of slices (ffi/cuda/kernels/rows.cuh).

    The count of unknown ids becomes a negative size. If the groups of a rank exceed the capacity with their padding
    only, the padding becomes part of the last slice of that rank.
    """
    n, total = table.shape[0], table.shape[1] - 1
    unknown = table[:, -1]
    if call.align > 1:
        rows = table[:, :total].sum(0, dtype=table.dtype).reshape(n, total // n)
        padding = -rows % call.align
        overfull = (rows + padding).sum(1, dtype=table.dtype) > capacity
        last = table[-1, :total].reshape(n, total // n)[:, -1] + jnp.where(overfull, padding[:, -1], 0)
        table = table.at[-1, total // n - 1 : total : total // n].set(last)
    return table.at[:, 0].set(jnp.where(unknown > 0, -unknown, table[:, 0]))


def _lower(ctx, table, *, platform, call, capacity, raises):
    if platform != "cpu":
        if not raises:
            return [table]
        # dispatch() and combine() refuse what their kernels do not check.
        if platform != "cuda" or _lowering.uses_xla(call, platform):
            refuse_unchecked(call)
        mark = functools.partial(_mark, call=call, capacity=capacity)
        return _compat.mlir.lower_fun(mark, multiple_results=False)(ctx, table)
    numbers = {"capacity": capacity, "align": call.align, "slots": call.slots, "raises": raises}
    given = {name: np.int64(number) for name, number in numbers.items()}
    keep = lambda x: [x]  # noqa: E731
    return lower_local(
        ctx, table, platform=platform, call=call, target="moe_check", numbers=given, xla=keep, aliases={0: 0}
    )


def lower_local(ctx, *args, platform, call, target, numbers, xla, aliases=None):
    """Lowers work of each rank to the custom call jaxcomm_<target>.

    Args:
      numbers: attributes of the custom call.
      xla: the same work by XLA, (*args) -> results.
      aliases: as in _lowering.lower.
    """
    return _lowering.lower(
        ctx,
        *args,
        platform=platform,
        # An algorithm does not concern work of one rank.
        call=dataclasses.replace(call, algorithm=None),
        target=f"jaxcomm_{target}",
        attributes=lambda x, n: numbers,
        alone=None,
        xla=xla,
        aliases=aliases,
        local=True,
    )


def unbatched(bind):
    """The vmap rule of a primitive of routes, which takes no operands with a dimension of vmap."""

    def batch(axis_data, args, dims, *, call, **params):
        if axis_data.name not in call.axes and all(dim is None for dim in dims):
            results = bind(*args, call=call, **params)
            return results, [None] * len(results) if isinstance(results, list | tuple) else None
        raise NotImplementedError(
            f"{call.op} at {call.site}: expert_ids have a dimension of vmap; call it without vmap"
        )

    return batch


check_p: _compat.Primitive = register(
    "moe_check",
    shape=lambda table, **params: table,
    lower=_lower,
    batch=unbatched(lambda *args, **params: check_p.bind(*args, **params)),
)
