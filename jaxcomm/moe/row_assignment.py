"""The assignment of rows to choices: counts of expert ids, slots, and the table of slices.

On CPUs, each of the three is one custom call (ffi/handlers/moe_places.cc). XLA:CPU would compute it by dozens of small
operations on each device, among them sorts and scatters, which cost more than the transfer of few rows. Other platforms
run the functions of this file.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _compat, _lowering
from jaxcomm._lowering import Call
from jaxcomm._primitive import register
from jaxcomm.moe import choice

# The arrays of a Routing.
FIELDS = ("slot", "expert", "group_sizes", "group_counts", "demand", "dropped", "table")


class Assignment(NamedTuple):
    """The arrays of a Routing that dispatch and combine need."""

    slot: Any
    expert: Any
    table: Any


def slices_and_order(
    ctx: Any, platform: str, assignment: Assignment, *, call: Any, per_choice: bool
) -> tuple[jax.Array, jax.Array]:
    """Computes slices() and (T K,), the row of the payload for each choice, packed by expert. Runs in a lowering.

    Args:
      ctx, platform: of the lowering.
      assignment: of a Routing.
      call: of dispatch() or combine().
      per_choice: the payload has a row per choice, not per token.
    """
    slot, expert, table = assignment
    n, total = table.shape
    starts = starts_of(table.sum(0, dtype=jnp.int32), total // n, call)
    if choice.assigns_by_custom_calls(platform):
        per_row = 1 if per_choice else max(slot.shape[1], 1)
        run = _custom_call(ctx, platform, call, "moe_slices")
        operands = _compat.equally_varying(slot, expert, table, starts)
        return tuple(run(operands, _int32((n, 4, total), (slot.size,)), {"choices_per_row": np.int64(per_row)}))
    vectors = slices(table, starts)
    number = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape)
    row = number if per_choice else number // slot.shape[1]
    position = packed(slot, expert, own(vectors, call))
    return vectors, jnp.zeros(slot.size, jnp.int32).at[position].set(row, mode="drop")


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
    """(T, K), the position of each choice among those of its rank, packed by expert; T K if it has no row."""
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


def _count(ids, *, platform, call):
    total = call.num_experts
    return [_counts(_in_order(ids, total), total)[None, : total + 1]]


def _assign(ids, wanted, *kept, platform, call):
    (tokens, choices), (n, total) = ids.shape, (wanted.shape[0], wanted.shape[1] - 1)
    local = total // n
    order = _in_order(ids, total)
    by_expert = _stable_order(order, total + 2)
    counts = _counts(order, total)
    before = jnp.cumsum(counts, dtype=counts.dtype) - counts
    positions = jnp.arange(len(order), dtype=jnp.int32) - before[order[by_expert]]
    index = jnp.zeros(order.shape, jnp.int32).at[by_expert].set(positions)
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
            ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0), dtype=jnp.int32), call.capacity)
            sizes = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))
        own_counts = jnp.clip(own_counts, 0, sizes)
    dropped = known.sum(dtype=jnp.int32) - valid.sum(dtype=jnp.int32)
    return [slot, jnp.where(valid, ids, -1), sizes, own_counts, demand, dropped, table]


def _stable_order(keys, num_keys):
    """argsort(keys, stable=True), for keys below `num_keys`."""
    size = len(keys)
    if size * num_keys >= 2**31:
        return jnp.argsort(keys, stable=True)
    # One operand instead of two: several times faster on CPUs. The position breaks ties.
    return jnp.sort(keys * size + jnp.arange(size, dtype=keys.dtype)) % max(size, 1)


def assigned_shapes(ids: Any, call: Any, num_ranks: int) -> list[tuple[int, ...]]:
    """The shapes of the arrays of a Routing."""
    local = call.num_experts // num_ranks
    return [ids.shape, ids.shape, (local,), (local,), (), (), (num_ranks, call.num_experts)]


def _int32(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def _custom_call(ctx: Any, platform: str, call: Call, target: str, aliases: dict[int, int] | None = None) -> Any:
    """As _lowering.custom_call, for work that each rank does alone: an algorithm does not concern it."""
    own = dataclasses.replace(call, algorithm=None)
    return _lowering.custom_call(_lowering.Site(ctx, own, platform), f"jaxcomm_{target}", aliases=aliases)


def register_local(
    name: str,
    *,
    shapes: Callable[..., Sequence[tuple[int, ...]]],
    numbers: Callable[..., dict[str, int]],
    run: Callable[..., Any],
    aliases: dict[int, int] | None = None,
) -> _compat.Primitive:
    """Returns a primitive of work that each rank does alone, on arrays of int32 without a dimension of vmap.

    Args:
      name: the primitive and the custom call are jaxcomm_<name>.
      shapes: (*avals, call) -> shapes of the results.
      numbers: call -> attributes of the custom call.
      run: the same work by XLA, (*operands, platform, call) -> results.
      aliases: operands by index, and the results that they are aliased to.
    """

    def abstract_eval(*avals, call):
        return [avals[0].update(shape=shape, weak_type=False) for shape in shapes(*avals, call=call)]

    def lower(ctx, *args, platform, call):
        if choice.assigns_by_custom_calls(platform):
            own = _custom_call(ctx, platform, call, name, aliases)
            types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out]
            attributes = {key: np.int64(number) for key, number in numbers(call).items()}
            body = lambda *xs: own(xs, types, attributes)  # noqa: E731
        else:
            body = functools.partial(run, platform=platform, call=call)
        return _lowering.lower_manual(ctx, *args, call=call, run=body)

    def batch(axis_data, args, dims, *, call):
        if axis_data.name in call.axes or any(dim is not None for dim in dims):
            raise NotImplementedError(
                f"{call.op} at {call.site}: expert_ids have a dimension of vmap; call it without vmap"
            )
        results = primitive.bind(*args, call=call)
        return results, [None] * len(results)

    primitive = register(name, shape=abstract_eval, lower=lower, batch=batch, multiple_results=True)
    return primitive


# ids (T, K), E for an unknown expert and negative for no choice -> (1, E + 1), the choices of each expert and of all
# unknown experts.
count_p = register_local(
    "moe_count",
    shapes=lambda ids, *, call: [(1, call.num_experts + 1)],
    numbers=lambda call: {},
    run=_count,
)
# ids, the counts of all ranks (n, E + 1), and how many choices of each rank get a row at each expert (n, E), if not all
# -> the arrays of a Routing.
assign_p = register_local(
    "moe_place",
    shapes=lambda ids, wanted, *kept, call: assigned_shapes(ids, call, wanted.shape[0]),
    numbers=lambda call: {"capacity": call.capacity, "align": call.align, "slots": call.slots},
    run=_assign,
)
