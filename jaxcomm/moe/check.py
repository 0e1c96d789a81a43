"""The check of a count matrix at run time. All ranks have the same matrix, so all raise or none."""

import dataclasses

import numpy as np

from jaxcomm import _lowering
from jaxcomm._primitive import register


def check(table, *, call, capacity, raises):
    """Returns `table`, (n, E + 1), or raises. Its last column counts ids of unknown experts."""
    return check_p.bind(table, call=call, capacity=capacity, raises=raises)


def _lower(ctx, table, *, platform, call, capacity, raises):
    if platform != "cpu":
        if raises:
            raise NotImplementedError(
                f"{call.op} at {call.site}: on_overflow='raise' works on CPUs only; pass on_overflow='drop' and look "
                "at Routing.dropped"
            )
        return [table]
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
