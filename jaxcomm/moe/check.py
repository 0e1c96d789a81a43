"""The check of a count matrix at run time. All ranks have the same matrix, so all raise or none.

On GPUs, the kernel of dispatch and combine makes the check, because Python learns of an error in the next call only.
"""

import jax.numpy as jnp

from jaxcomm import _lowering
from jaxcomm.moe.choice import refuse_unchecked
from jaxcomm.moe.row_assignment import register_local


def _mark(table, call):
    """Sizes by which the kernel recognizes what it cannot see in the table of slices (ffi/cuda/kernels/rows.cuh).

    The count of unknown ids becomes a negative size. If the groups of a rank exceed the capacity with their padding
    only, the padding becomes part of the last slice of that rank.
    """
    n, total = table.shape[0], table.shape[1] - 1
    unknown = table[:, -1]
    if call.align > 1:
        rows = table[:, :total].sum(0, dtype=table.dtype).reshape(n, total // n)
        padding = -rows % call.align
        overfull = (rows + padding).sum(1, dtype=table.dtype) > call.capacity
        last = table[-1, :total].reshape(n, total // n)[:, -1] + jnp.where(overfull, padding[:, -1], 0)
        table = table.at[-1, total // n - 1 : total : total // n].set(last)
    return table.at[:, 0].set(jnp.where(unknown > 0, -unknown, table[:, 0]))


def _without_custom_call(table, *, platform, call):
    if platform == "cpu" or not call.raises:
        return [table]
    # dispatch() and combine() refuse what their kernels do not check.
    if reason := _lowering.why_xla(platform, call.algorithm):
        refuse_unchecked(call, reason)
    return [_mark(table, call)]


# (n, E + 1) -> the same, or an error. The last column counts ids of unknown experts.
check_p = register_local(
    "moe_check",
    shapes=lambda table, *, call: [table.shape],
    numbers=lambda call: {
        "capacity": call.capacity, "align": call.align, "slots": call.slots, "raises": call.raises,
    },
    run=_without_custom_call,
    aliases={0: 0},
)  # fmt: skip
