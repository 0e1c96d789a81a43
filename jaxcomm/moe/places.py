"""The places of choices: counts of expert ids, slots, and the table of slices.

On CPUs each of the three is one custom call (ffi/handlers/moe_places.cc). XLA:CPU would compute them by dozens of small
operations on each device, among them sorts and scatters, which cost more than the rows of few tokens. Other platforms
run the functions of this file.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat
from jaxcomm._primitive import register
from jaxcomm.moe.check import lower_local, unbatched

# What place() returns: the arrays of a Routing.
FIELDS = ("slot", "expert", "group_sizes", "group_counts", "demand", "dropped", "table")


def count(ids: jax.Array, *, call: Any, num_experts: int) -> jax.Array:
    """(1, E + 1), the choices of each expert, and those of experts that do not exist.

    Args:
      ids: (T, K) int32; E for an expert that does not exist, negative for no choice.
      call: of route().
      num_experts: E.
    """
    return count_p.bind(ids, call=call, num_experts=num_experts)


def place(ids: jax.Array, wanted: jax.Array, *kept: jax.Array, call: Any, capacity: int) -> list[jax.Array]:
    """The fields of a Routing, in the order of FIELDS.

    Args:
      ids: as for count().
      wanted: (n, E + 1), the counts of all ranks.
      kept: (n, E), how many choices of each rank get a row at each expert; none: all.
      call: the RouteCall.
      capacity: C.
    """
    return place_p.bind(*_compat.equally_varying(ids, wanted, *kept), call=call, capacity=capacity)


def slices_and_order(
    slot: jax.Array, expert: jax.Array, table: jax.Array, starts: jax.Array, *, call: Any, per_choice: bool
) -> tuple[jax.Array, jax.Array]:
    """slices(table, starts), and (T K,), the row of the payload for each choice, packed by expert.

    Args:
      slot, expert: (T, K), of a Routing.
      table, starts: as for slices().
      call: of dispatch() or combine().
      per_choice: the payload has a row per choice, not per token.
    """
    where = _compat.equally_varying(slot, expert, table, starts)
    whole, order = slices_p.bind(*where, call=call, per_choice=per_choice)
    return whole, order


def slices(table: jax.Array, starts: jax.Array) -> jax.Array:
    """The table of ragged_all_to_all, one slice per pair of source rank and expert. Choices are packed by expert.

    Args:
      table: (n, E), rows of each rank for each expert.
      starts: (E,), first row of each expert at its rank.
    """
    n, total = table.shape
    inputs = jnp.cumsum(table, 1, dtype=table.dtype) - table
    outputs = starts[None] + jnp.cumsum(table, 0, dtype=table.dtype) - table
    received = table.reshape(n, n, total // n).transpose(1, 0, 2).reshape(n, total)
    return jnp.stack([inputs, table, outputs, received], axis=1)


def packed(slot, expert, vectors):
    """(T, K), the place of each choice among those of its rank, packed by expert; T K if it has no row."""
    inputs, _, outputs, _ = vectors
    safe = jnp.maximum(expert, 0)
    return jnp.where(slot >= 0, slot - outputs[safe] + inputs[safe], slot.size)


def own(table, call):
    return lax.dynamic_index_in_dim(table, lax.axis_index(call.axes), 0, keepdims=False)


def aligned(counts, align):
    return -(-counts // align) * align


def starts_of(groups, local, call):
    """(E,), the first row of each group at its rank. groups: (E,), rows without padding."""
    if call.slots:
        return jnp.tile(jnp.arange(local, dtype=jnp.int32) * call.slots, len(groups) // local)
    sizes = aligned(groups, call.align).reshape(-1, local)
    return (jnp.cumsum(sizes, 1, dtype=sizes.dtype) - sizes).reshape(-1).astype(jnp.int32)


def _in_order(ids, num_experts):
    """First choices of all tokens before second ones; no choice comes last."""
    order = ids.T.reshape(-1)
    return jnp.where(order < 0, num_experts + 1, order)


def _counts(order, num_experts):
    return jnp.zeros(num_experts + 2, jnp.int32).at[order].add(1)


def _count(ids, *, call, num_experts):
    return [_counts(_in_order(ids, num_experts), num_experts)[None, : num_experts + 1]]


def _place(ids, wanted, *kept, call, capacity):
    (tokens, choices), (n, total) = ids.shape, (wanted.shape[0], wanted.shape[1] - 1)
    local = total // n
    order = _in_order(ids, total)
    by_expert = _stable_order(order, total + 2)
    counts = _counts(order, total)
    before = jnp.cumsum(counts, dtype=counts.dtype) - counts
    places = jnp.arange(len(order), dtype=jnp.int32) - before[order[by_expert]]
    index = jnp.zeros(order.shape, jnp.int32).at[by_expert].set(places)
    index = index.reshape(choices, tokens).T
    wanted = wanted[:, :total]
    table = kept[0] if kept else wanted
    me = lax.axis_index(call.axes).astype(jnp.int32)
    groups = table.sum(0, dtype=jnp.int32)
    starts = starts_of(groups, local, call)
    mine = lax.dynamic_index_in_dim(table, me, 0, keepdims=False)
    earlier = jnp.where(jnp.arange(n, dtype=jnp.int32)[:, None] < me, table, 0).sum(0, dtype=jnp.int32)
    known = (ids >= 0) & (ids < total)
    safe = jnp.clip(ids, 0, total - 1)
    valid = known & (index < mine[safe])
    slot = jnp.where(valid, starts[safe] + earlier[safe] + index, -1)
    own_counts = lax.dynamic_slice_in_dim(groups, me * local, local)
    own_wanted = lax.dynamic_slice_in_dim(wanted.sum(0, dtype=jnp.int32), me * local, local)
    if call.slots:
        sizes, demand = jnp.full_like(own_counts, call.slots), own_wanted.sum(dtype=jnp.int32)
    else:
        sizes, demand = aligned(own_counts, call.align), aligned(own_wanted, call.align).sum(dtype=jnp.int32)
    if call.raises:
        # On GPUs, the program goes on after an overflow until its next call. No group may reach outside of the slots.
        if not call.slots:
            ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0), dtype=jnp.int32), capacity)
            sizes = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))
        own_counts = jnp.clip(own_counts, 0, sizes)
    dropped = known.sum(dtype=jnp.int32) - valid.sum(dtype=jnp.int32)
    return [slot, jnp.where(valid, ids, -1), sizes, own_counts, demand, dropped, table]


def _stable_order(keys, num_keys):
    """argsort(keys, stable=True), for keys below `num_keys`."""
    size = len(keys)
    if size * num_keys >= 2**31:
        return jnp.argsort(keys, stable=True)
    # One operand instead of two: several times faster on CPUs. The place breaks ties.
    return jnp.sort(keys * size + jnp.arange(size, dtype=keys.dtype)) % max(size, 1)


def _slices_and_order(slot, expert, table, starts, *, call, per_choice):
    whole = slices(table, starts)
    number = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape)
    row = number if per_choice else number // slot.shape[1]
    place = packed(slot, expert, own(whole, call))
    return [whole, jnp.zeros(slot.size, jnp.int32).at[place].set(row, mode="drop")]


def _ints(x, *shapes):
    return [x.update(shape=shape, dtype=jnp.dtype(jnp.int32), weak_type=False) for shape in shapes]


def _count_shape(ids, *, call, num_experts):
    return _ints(ids, (1, num_experts + 1))[0]


def _place_shape(ids, wanted, *kept, call, capacity):
    n, total = wanted.shape[0], wanted.shape[1] - 1
    return _ints(ids, ids.shape, ids.shape, (total // n,), (total // n,), (), (), (n, total))


def _slices_shape(slot, expert, table, starts, *, call, per_choice):
    return _ints(slot, (_check.group_size(call.axes, None), 4, starts.size), (slot.size,))


def _rule(target, run, numbers):
    """A lowering rule: the custom call on CPUs, elsewhere `run`. numbers: (avals_in, call, **params) -> integers."""

    def lower(ctx, *args, platform, call, **params):
        other = functools.partial(run, call=call, **params)
        if platform != "cpu":
            return _compat.mlir.lower_fun(other, multiple_results=True)(ctx, *args)
        given = {name: np.int64(number) for name, number in numbers(ctx.avals_in, call, **params).items()}
        return lower_local(ctx, *args, platform=platform, call=call, target=target, numbers=given, xla=other)

    return lower


count_p: _compat.Primitive = register(
    "moe_count",
    shape=_count_shape,
    lower=_rule("moe_count", _count, lambda avals, call, num_experts: {}),
    batch=unbatched(lambda *args, **params: count_p.bind(*args, **params)),
)
place_p: _compat.Primitive = register(
    "moe_place",
    shape=_place_shape,
    lower=_rule(
        "moe_place",
        _place,
        lambda avals, call, capacity: {"capacity": capacity, "align": call.align, "slots": call.slots},
    ),
    batch=unbatched(lambda *args, **params: place_p.bind(*args, **params)),
    multiple_results=True,
)
slices_p = register(
    "moe_slices",
    shape=_slices_shape,
    lower=_rule(
        "moe_slices",
        _slices_and_order,
        lambda avals, call, per_choice: {"choices_per_row": 1 if per_choice else max(avals[0].shape[1], 1)},
    ),
    multiple_results=True,
)
