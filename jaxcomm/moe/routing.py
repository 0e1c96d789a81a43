"""route(): the place of every choice, as a function of all expert ids."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _check, _compat
from jaxcomm._lowering import Call
from jaxcomm._typing import AxisName
from jaxcomm.moe.check import check_p
from jaxcomm.moe.row_assignment import FIELDS, Assignment, aligned, assign_p, count_p
from jaxcomm.ops._shared import make_call
from jaxcomm.ops.all_gather import all_gather_p


@dataclasses.dataclass(frozen=True)
class RouteCall(Call):
    """The arguments of a call, and those of route() that define the layout of the rows.

    Attributes:
      num_experts: E.
      capacity: C.
      align: groups start at multiples of it.
      slots: rows per expert; 0 if groups follow each other.
      raises: whether an overflow is an error.
      reduce: "node" or "home".
    """

    num_experts: int = 0
    capacity: int = 0
    align: int = 1
    slots: int = 0
    raises: bool = False
    reduce: str = "node"

    def with_sizes(self, ids: Any, *more: str) -> "RouteCall":
        """The call with its sizes in its site, which the error of ranks with different sizes prints for both."""
        tokens, choices = ids.shape
        numbers = f"{tokens} tokens", f"{choices} choices", f"{self.num_experts} experts", f"capacity {self.capacity}"
        return dataclasses.replace(self, site=f"{self.site} [{', '.join((*numbers, *more))}]")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=FIELDS,
    meta_fields=("call",),
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where the rows of each token go. Plain data: arrays of int32 that vary over the axes, and static values.

    T tokens per rank, K choices per token, M experts per rank, C rows that a rank can receive.

    Attributes:
      slot: (T, K), the row at the rank of the expert; -1 if the choice has no row.
      expert: (T, K), the number of the expert; -1 if the choice has no row.
      group_sizes: (M,), rows of each local expert with padding, as jax.lax.ragged_dot takes them.
      group_counts: (M,), rows of each local expert without padding.
      demand: (), rows that this rank needed to receive everything, with padding.
      dropped: (), choices of this rank that were dropped.
      table: (n, E), rows of each rank for each expert, the same on all ranks.
      call: axes, call site, and the static arguments of route().
    """

    slot: jax.Array
    expert: jax.Array
    group_sizes: jax.Array
    group_counts: jax.Array
    demand: jax.Array
    dropped: jax.Array
    table: jax.Array
    call: RouteCall

    @classmethod
    def of(cls, arrays: Sequence[jax.Array], call: RouteCall) -> "Routing":
        """The routing of these arrays, in the order of FIELDS."""
        return cls(**dict(zip(FIELDS, arrays, strict=True)), call=call)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.call.num_experts

    @property
    def capacity(self) -> int:
        """C."""
        return self.call.capacity

    @property
    def reduce(self) -> str:
        """The order of the sums of combine(): "node" or "home", see route()."""
        return self.call.reduce

    def assignment(self) -> Assignment:
        """The arrays that dispatch and combine need."""
        return Assignment(self.slot, self.expert, self.table)


def route(
    expert_ids: Any,
    axis_name: AxisName,
    *,
    num_experts: int,
    capacity: int | None = None,
    align: int = 1,
    slots: int | None = None,
    on_overflow: str = "raise",
    reduce: str = "node",
) -> Routing:
    """Assigns a row at the rank of its expert to every choice of every token.

    The places depend on the ids alone, not on the order of arrival. The rows of an expert form a group, in the order of
    the source ranks; those of one rank hold the first choices of all its tokens before the second ones.

    Args:
      expert_ids: (T, K) integers. A negative number is no choice. A token may choose an expert several times.
      axis_name: mesh axis, or tuple of axes, outermost first, over which the experts are divided. Several axes declare
        a hierarchy: the innermost axis stays inside a node.
      num_experts: E, a multiple of the number n of ranks. Expert e belongs to rank e // M, with M = E / n.
      capacity: C, rows that a rank can receive. None means n T min(K, M) + M (align - 1), rounded up to `align`: enough
        for all tokens if the choices of a token differ.
      align: groups start at multiples of this number; rows in between are zero.
      slots: rows per expert, instead of `capacity` and `align`: C = M slots, and group e starts at row e slots.
      on_overflow: "raise", or "drop" the choices that do not fit. Each pair of source rank and expert keeps the same
        number of choices, as far as it has them; first choices are kept first.
      reduce: order of the sums of combine(). "node" adds the rows of each node, rounds, and adds the nodes; "home" adds
        all rows in the order of the choices, with the same bits for every number of ranks. With "hierarchical" on GPUs,
        nodes are those that NVLink connects.

    Returns:
      A Routing.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map.
      ValueError: invalid shapes or numbers (when tracing).
      TypeError: expert_ids are not integers, or a tracer in place of a static value (when tracing).
      NotImplementedError: on_overflow is "raise", but rows move by XLA's own collective (when compiling).
      jax.errors.JaxRuntimeError: an id is E or larger, or a rank overflows and on_overflow is "raise": on all ranks,
        before a row moves. On CPUs, this call raises. On GPUs, dispatch() moves no rows and the next call raises;
        where rows move by XLA's own collective, on_overflow must be "drop", and ids of E or more are no choices (at
        run time).

    Cost: an all_gather of E + 1 integers.
    """
    return route_prepared(
        *prepare("moe.route", expert_ids, axis_name, num_experts, capacity, align, slots, on_overflow, reduce)
    )


def prepare(op, expert_ids, axis_name, num_experts, capacity, align, slots, on_overflow, reduce):
    """Checks the arguments of route(). Returns the ids for count_p, and the call."""
    ids = jnp.asarray(expert_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{op}: expert_ids must have integers, got element type {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"{op}: expert_ids must have shape (tokens, choices), got {ids.shape}")
    spec = jax.typeof(ids).sharding.spec
    if any(names is not None for names in spec):
        raise ValueError(
            f"{op} at {_check.call_site()}: expert_ids are sharded over explicit mesh axes ({spec}); reshard them "
            "first (jax.sharding.reshard)"
        )
    for name, value, allowed in (("on_overflow", on_overflow, ("raise", "drop")), ("reduce", reduce, ("node", "home"))):
        if value not in allowed:
            raise ValueError(f"{op}: {name} must be one of {', '.join(allowed)}, got {value!r}")
    call = make_call(op, "all_to_all_v", axis_name, None, {})
    n = _check.group_size(call.axes, None)
    total = _check.positive(op, "num_experts", num_experts)
    if total % n:
        raise ValueError(f"{op}: num_experts={total} must be a multiple of the {n} ranks of {call.axes}")
    local, (tokens, choices) = total // n, ids.shape
    if slots is not None:
        if capacity is not None or align != 1:
            raise ValueError(f"{op}: slots cannot be combined with capacity or align")
        slots = _check.positive(op, "slots", slots)
        rows = local * slots
    else:
        align = _check.positive(op, "align", align)
        rows = n * tokens * min(choices, local) + local * (align - 1)
        rows = -(-rows // align) * align
        if capacity is not None:
            rows = _check.integer(op, "capacity", capacity)
            if rows < 0:
                raise ValueError(f"{op}: capacity must not be negative, got {rows}")
    fields = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    route_call = RouteCall(
        **fields,
        num_experts=total,
        capacity=rows,
        align=align,
        slots=slots or 0,
        raises=on_overflow == "raise",
        reduce=reduce,
    )
    return _known_ids(_compat.make_varying(ids, call.axes), total), route_call


def route_prepared(ids: jax.Array, call: RouteCall) -> Routing:
    """The routing of the results of prepare()."""
    (counts,) = count_p.bind(ids, call=call)
    table = all_gather_p.bind(counts, call=call.with_sizes(ids), axis=0)
    (table,) = check_p.bind(table, call=call)
    kept = [] if call.raises else [_keep(table[:, :-1], ids.size, call)]
    return Routing.of(assign_p.bind(*_compat.equally_varying(ids, table, *kept), call=call), call)


def _known_ids(ids, total):
    """The ids as int32: `total` for an unknown expert, -1 for no choice."""
    # Clamped in their own type, because int32 may not have the id, and the type of the id may not have `total`.
    largest = min(total, jnp.iinfo(ids.dtype).max)
    ids = jnp.minimum(ids, largest)
    if not jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        ids = jnp.maximum(ids, -1)
    ids = ids.astype(jnp.int32)
    return jnp.where(ids < 0, -1, ids)


def _keep(wanted, most, call):
    """(n, E), the choices that are kept. A cell is a pair of source rank and expert.

    Every cell of a rank keeps up to q choices, with the largest q for which the groups fit. Then the first x cells that
    have another one keep one more, with the largest x. With slots, each expert is on its own.

    Args:
      wanted: (n, E).
      most: T K.
      call: the RouteCall.
    """
    n, total = wanted.shape
    parts = (total, 1) if call.slots else (n, total // n)  # what has a capacity, and its experts
    limit = call.slots or call.capacity
    cells = wanted.reshape(n, *parts)

    def fits(kept):
        return aligned(kept.sum(0, dtype=jnp.int32), call.align).sum(-1, dtype=jnp.int32) <= limit

    def largest(most, kept_with):
        """(parts,), the largest number of 0 to `most` for which kept_with(number) fits; 0 fits."""

        def halve(_, bounds):
            low, high = bounds
            middle = (low + high + 1) // 2
            good = fits(kept_with(middle))
            return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

        low = 0 * cells.sum((0, 2), dtype=jnp.int32)
        return lax.fori_loop(0, max(1, math.ceil(math.log2(most + 1))), halve, (low, low + most))[0]

    quota = largest(most, lambda q: jnp.minimum(cells, q[None, :, None]))
    kept = jnp.minimum(cells, quota[None, :, None])
    more = (cells > kept).astype(jnp.int32).transpose(1, 0, 2)  # (parts, source, expert)
    rank = jnp.cumsum(more.reshape(parts[0], -1), 1, dtype=jnp.int32).reshape(more.shape) * more
    added = lambda x: ((rank > 0) & (rank <= x[:, None, None])).astype(jnp.int32).transpose(1, 0, 2)  # noqa: E731
    extra = largest(total, lambda x: kept + added(x))
    return (kept + added(extra)).reshape(n, total)
