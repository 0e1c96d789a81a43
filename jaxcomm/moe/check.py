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
    return _lowering.lower(
        ctx,
        table,
        platform=platform,
        # algorithm="xla" for a whole program does not concern a check.
        call=dataclasses.replace(call, algorithm=None),
        target="jaxcomm_moe_check",
        attributes=lambda x, n: {
            "capacity": np.int64(capacity),
            "align": np.int64(call.align),
            "slots": np.int64(call.slots),
            "raises": np.int64(raises),
        },
        alone=None,
        xla=lambda x: [x],
        aliases={0: 0},
    )


def _batch(axis_data, args, dims, *, call, **params):
    if dims[0] is None and axis_data.name not in call.axes:
        return check_p.bind(*args, call=call, **params), None
    raise NotImplementedError(f"{call.op} at {call.site}: expert_ids have a dimension of vmap; call it without vmap")


check_p = register("moe_check", shape=lambda table, **params: table, lower=_lower, batch=_batch)
