"""The lowering of dispatch and combine: to jaxcomm's own custom calls, or to XLA's ragged_all_to_all."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _compat, _lowering
from jaxcomm._core import plan
from jaxcomm._dtypes import accumulator_type, in_bytes
from jaxcomm.moe.choice import choose
from jaxcomm.moe.row_assignment import Assignment, own, packed, slices_and_order
from jaxcomm.moe.rows import join, joined_type, separate
from jaxcomm.ops.ragged_all_to_all import reverse


def split(operands: Sequence[Any]) -> tuple[list[Any], Assignment]:
    """The operands of a primitive: the payloads of dispatch, or rows and weights of combine; and where rows go."""
    return list(operands[:-3]), Assignment(*operands[-3:])


def lower_dispatch(ctx: Any, *operands: Any, platform: str, call: Any, per_choice: bool) -> Any:
    move = _exchange(ctx, platform, call, per_choice, "dispatch", split(ctx.avals_in)[0])

    def run(*operands):
        xs, assignment = split(operands)
        if move is None:
            return [jnp.zeros((call.capacity, x.shape[1]), x.dtype) for x in xs]
        return separate(move.dispatch(join(xs), assignment), xs)

    return _lowering.lower_manual(ctx, *operands, call=call, run=run)


def lower_combine(ctx: Any, *operands: Any, platform: str, call: Any, per_choice: bool) -> Any:
    (rows, *weights), _ = split(ctx.avals_in)
    order = {"home": int(call.reduce == "home"), "weighted": len(weights)}
    move = _exchange(ctx, platform, call, per_choice, "combine", [rows], **order)

    def run(*operands):
        (rows, *weights), assignment = split(operands)
        if move is None:
            return [jnp.zeros((ctx.avals_out[0].shape[0], rows.shape[1]), rows.dtype)]
        return [move.combine(rows, weights[0] if weights else None, assignment)]

    return _lowering.lower_manual(ctx, *operands, call=call, run=run)


def _exchange(
    ctx: Any, platform: str, call: Any, per_choice: bool, collective: str, rows: list[Any], **attributes: int
) -> "_Exchange | None":
    """What runs a call that moves these rows; None if there are no choices of experts, so that no row moves."""
    shape = split(ctx.avals_in)[1].slot.shape
    if not shape[1] or not _compat.in_spmd_region(ctx.module_context.axis_context):  # lower_manual raises
        return None
    site = _lowering.Site(ctx, call, platform)
    width, dtype = joined_type(rows)
    numbers = (rows[0].shape[0], ctx.avals_out[0].shape[0])
    found = choose(site, collective, shape, numbers, width, dtype, per_choice=per_choice, **attributes)
    return _Exchange(ctx, site, per_choice, found)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """A dispatch or combine that is being lowered. The methods see the operands of one device.

    Attributes:
      per_choice: payloads have a row per choice, not per token.
    """

    ctx: Any
    site: _lowering.Site
    per_choice: bool
    found: plan.Resolution

    @property
    def call(self) -> Any:
        """The RouteCall."""
        return self.site.call

    @property
    def _moves_natively(self) -> bool:
        return bool(self.found.backend != "xla")

    def dispatch(self, rows: jax.Array, assignment: Assignment) -> jax.Array:
        """(T or T K, W) -> (C, W)."""
        vectors, order = self._slices(assignment)
        if self._moves_natively:
            numbers = {"per_choice": self.per_choice}
            return self._custom_call("dispatch", (rows, order, vectors), assignment, self.call.capacity, numbers)
        return self._ragged_all_to_all(rows[order] if len(rows) else rows, self.call.capacity, vectors)

    def combine(self, rows: jax.Array, weights: jax.Array | None, assignment: Assignment) -> jax.Array:
        """(C, W), weights (T, K) -> (T, W), or (T K, W) per choice."""
        if self.per_choice:
            return self._fetch(rows, assignment)
        if self._moves_natively and not self.found.returns_choices:
            return self._combine(rows, weights, assignment, per_choice=False)
        n, total = assignment.table.shape
        nodes = n // self.site.ranks_per_node if self.call.reduce == "node" else 1
        choices = self._fetch(rows, assignment).reshape(*assignment.slot.shape, rows.shape[1])
        return _add(choices, weights, assignment.expert // (total // nodes), nodes)

    def _fetch(self, rows: jax.Array, assignment: Assignment) -> jax.Array:
        """(C, W) -> (T K, W), the rows of all choices at the rank of their tokens."""
        if self._moves_natively:
            return self._combine(rows, None, assignment, per_choice=True)
        vectors, _ = self._slices(assignment)
        arrived = self._ragged_all_to_all(rows, assignment.slot.size, reverse(vectors))
        position = packed(assignment.slot, assignment.expert, own(vectors, self.call))
        return arrived.at[position.reshape(-1)].get(mode="fill", fill_value=0)

    def _combine(self, rows, weights, assignment, *, per_choice):
        dtype = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
        factors = jnp.zeros(0, dtype) if weights is None else weights.astype(dtype)
        operands = rows, assignment.slot, assignment.expert, factors, self._slices(assignment)[0]
        numbers = {
            "per_choice": per_choice,
            "home": self.call.reduce == "home",
            "weighted": weights is not None,
        }
        size = assignment.slot.size if per_choice else len(assignment.slot)
        return self._custom_call("combine", operands, assignment, size, numbers)

    def _slices(self, assignment):
        return slices_and_order(self.ctx, self.site.platform, assignment, call=self.call, per_choice=self.per_choice)

    def _custom_call(self, name, operands, assignment, num_rows, numbers):
        # On GPUs, NCCL may find nodes where Python sees none: the name says which kernel runs.
        algorithm = self.found.algorithm if self.found.backend == "rows" else self.call.algorithm
        run = _lowering.custom_call(self.site, f"jaxcomm_{name}", algorithm=algorithm)
        rows, choices = operands[0], assignment.slot.shape[1]
        numbers |= {"row_count": rows.shape[1], "choices": choices, "num_experts": self.call.num_experts}
        types = [jax.ShapeDtypeStruct((num_rows, rows.shape[1]), rows.dtype)]
        attributes = {name: np.int64(number) for name, number in numbers.items()}
        return run(_compat.equally_varying(*operands), types, attributes)[0]

    def _ragged_all_to_all(self, rows, num_rows, vectors):
        zeros = jnp.zeros((num_rows, rows.shape[1]), in_bytes(rows.dtype))
        if not zeros.size:  # XLA rejects some empty collectives
            return zeros.astype(rows.dtype)
        operands = rows.astype(zeros.dtype), zeros, *own(vectors, self.call)
        axes = self.call.axes
        result = lax.ragged_all_to_all(*_compat.equally_varying(*operands), axis_name=axes)
        return result.astype(rows.dtype)


def _add(choices: jax.Array, weights: jax.Array | None, node: jax.Array, nodes: int) -> jax.Array:
    """The sums of the rows of each token, node by node, rounded after each node.

    Args:
      choices: (T, K, W).
      weights: (T, K).
      node: (T, K), the node of each expert.
      nodes: number of nodes.
    """
    dtype = accumulator_type(choices.dtype)
    y = jnp.zeros(choices.shape[::2], dtype)
    for g in range(nodes):
        part = jnp.zeros_like(y)
        for k in range(choices.shape[1]):
            row = choices[:, k].astype(dtype)
            if nodes > 1:
                row = jnp.where((node[:, k] == g)[:, None], row, jnp.zeros_like(row))
            part = part + (row if weights is None else row * weights[:, k, None].astype(dtype))
        y = y + (part.astype(choices.dtype).astype(dtype) if nodes > 1 else part)
    return y.astype(choices.dtype)
