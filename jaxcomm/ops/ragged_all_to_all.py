"""ragged_all_to_all: every rank sends slices of different sizes to every rank."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _check, _compat, _lowering
from jaxcomm._dtypes import accumulator_type
from jaxcomm._primitive import rank_in_group, register
from jaxcomm._typing import AxisIndexGroups, AxisName
from jaxcomm.ops._shared import Options, collective, make_call
from jaxcomm.ops.all_gather import all_gather_p

_VECTORS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@collective()
def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Sends slices of ``operand``, counted in rows, to all ranks, and writes the received slices into ``output``.

    A group of n ranks has N / n slices for each pair of ranks. Slice i of a rank goes to rank i // (N / n). The numbers
    may differ from rank to rank and from call to call; only the shapes are static.

    Args:
      operand: (R, ...), the rows to send.
      output: (Q, ...), the start value of the result, with the element type and the trailing sizes of ``operand``.
      input_offsets: (N,) integers, the first row of each slice in ``operand``.
      send_sizes: (N,) integers, the rows of each slice.
      output_offsets: (N,) integers, the first row of each slice in the result of its receiver.
      recv_sizes: (N,) integers, the rows that arrive: the all_to_all of all ``send_sizes``.
      algorithm: a name from ``algorithms("ragged_all_to_all")``, or "xla" for XLA's own collective, which CPUs lack.
        None selects it by the selection table. GPUs have "direct", inside a node. Between nodes of GPUs and on other
        platforms, XLA's own collective runs.

    Returns:
      (Q, ...), varying over the axes. Rows that no slice has reached are those of ``output``.

    Raises:
      ValueError: invalid shapes, element types, groups or algorithm (when tracing).
      NotImplementedError: an axis of vmap, or an algorithm that the platform lacks.
      jax.errors.JaxRuntimeError: a slice exceeds the operand or the output, two slices overlap in the output of a rank,
        or sizes disagree: all ranks raise, and the message shows both ranks. A rank died or did not arrive within
        JAXCOMM_TIMEOUT_S, or calls of ranks differ (at run time). On GPUs, the next call raises. XLA's own collective
        does not check slices.

    Cost: an all_gather of 4 N integers, then the rows of all slices, in at most N messages per rank. See
    docs/reference/algorithms.md.
    """
    op = "ragged_all_to_all"
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    vectors = [jnp.asarray(v) for v in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    _check_arguments(op, operand, output, vectors)
    call = make_call(op, "all_to_all_v", axis_name, axis_index_groups, options)
    n = _check.group_size(call.axes, call.groups)
    if len(vectors[0]) % n:
        raise ValueError(
            f"{op}: the {len(vectors[0])} slices of input_offsets cannot be divided among the {n} ranks of {call.axes}"
        )
    wide = any(v.dtype.itemsize == 8 for v in vectors)
    table = jnp.stack([v.astype(jnp.int64 if wide else jnp.int32) for v in vectors])
    gather = dataclasses.replace(call, algorithm="xla" if call.algorithm == "xla" else None)
    table = all_gather_p.bind(_compat.make_varying(table[None], call.axes), call=gather, axis=0)
    return exchange(operand, output, table, call=call)


def _check_arguments(op: str, operand: jax.Array, output: jax.Array, vectors: Sequence[jax.Array]) -> None:
    _check.element_type(op, operand)
    if operand.ndim < 1 or output.ndim < 1 or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"{op}: operand and output must have rows of one shape, got shapes {operand.shape} and {output.shape}"
        )
    if operand.dtype != output.dtype:
        raise ValueError(f"{op}: operand and output must have one element type, got {operand.dtype} and {output.dtype}")
    for name, vector in zip(_VECTORS, vectors, strict=True):
        if not jnp.issubdtype(vector.dtype, jnp.integer):
            raise ValueError(f"{op}: {name} must have integers, got element type {vector.dtype}")
        if vector.ndim != 1 or vector.size == 0:
            raise ValueError(f"{op}: {name} must have one dimension and at least one slice, got shape {vector.shape}")
        if vector.shape != vectors[0].shape:
            raise ValueError(
                f"{op}: {name} has {vector.size} slices, but input_offsets has {vectors[0].size}; expected as many"
            )


def exchange(operand: jax.Array, output: jax.Array, table: jax.Array, *, call: _lowering.Call) -> jax.Array:
    """The exchange with a table that all ranks have.

    Args:
      operand: (R, ...).
      output: (Q, ...).
      table: (n, 4, N), varying over the axes; row r has the vectors of rank r, in the order of the arguments of
        ragged_all_to_all.
      call: arguments of the op.
    """
    return all_to_all_v_p.bind(*_compat.equally_varying(operand, output, table), call=call)


def _shape(operand, output, table, *, call):
    for name, x in (("operand", operand), ("output", output)):
        _check.unsharded(call.op, name, 0, x)
    return output.update(weak_type=False)


def _lower(ctx, operand, output, table, *, platform, call):
    return _lowering.lower(
        ctx,
        operand,
        output,
        table,
        platform=platform,
        call=call,
        target="jaxcomm_all_to_all_v",
        attributes=lambda x, n: {"row_count": np.int64(np.prod(x.shape[1:], dtype=np.int64))},
        alone=None,
        xla=lambda operand, output, table: [_xla(operand, output, table, call)],
        aliases={1: 0},
    )


def _own_row(table, call):
    """This rank's row of a table."""
    return lax.dynamic_index_in_dim(table, rank_in_group(call), 0, keepdims=False)


def _xla(operand, output, table, call):
    vectors = _own_row(table, call)
    return lax.ragged_all_to_all(operand, output, *vectors, axis_name=call.axes, axis_index_groups=call.groups)


def _jvp(primals, tangents, *, call):
    operand, output, table = primals
    result = all_to_all_v_p.bind(operand, output, table, call=call)
    moved, kept, _ = tangents
    moved, kept = (_compat.ad.instantiate_zeros(t) for t in (moved, kept))
    return result, exchange(moved, kept, table, call=call)


def _transpose(ct, operand, output, table, *, call):
    moves, keeps = (_compat.ad.is_undefined_primal(x) for x in (operand, output))
    if type(ct) is _compat.ad.Zero:
        zeros = [_compat.ad.Zero(x.aval) if undefined else None for x, undefined in ((operand, moves), (output, keeps))]
        return [*zeros, None]
    return [
        _transpose_operand(ct, operand.aval, table, call) if moves else None,
        _transpose_output(ct, table, call) if keeps else None,
        None,
    ]


def reverse(table: jax.Array) -> jax.Array:
    """The table of the exchange that returns every slice to its sender.

    Args:
      table: (n, 4, N).
    """
    n, _, per_rank = table.shape
    pairs = table.reshape(n, 4, n, per_rank // n)
    received = pairs.transpose(2, 1, 0, 3).reshape(n, 4, per_rank)  # as the receivers count the slices
    return jnp.stack([received[:, 2], table[:, 3], received[:, 0], table[:, 1]], axis=1)


def _transpose_operand(ct, aval, table, call):
    """The cotangent of the operand: every row is the sum over the slices that sent it, in the order of ranks."""
    back = reverse(table)
    _, _, zeros = _compat.equally_varying(ct, back, jnp.zeros(aval.shape, aval.dtype))

    def at_once(ct):
        return exchange(ct, zeros, back, call=call)

    def slice_by_slice(ct):
        # Slices overlap, so that only one can be written at a time.
        def step(i, total):
            chosen = back.at[:, 1].set(jnp.where(arriving == i, back[:, 1], 0))
            chosen = chosen.at[:, 3].set(jnp.where(jnp.arange(back.shape[2]) == i, back[:, 3], 0))
            return total + exchange(ct, zeros, chosen, call=call).astype(total.dtype)

        n, _, per_rank = back.shape
        # arriving[r, i]: the number, at its receiver, of slice i of rank r
        arriving = jnp.arange(n)[:, None] * (per_rank // n) + jnp.arange(per_rank)[None, :] % (per_rank // n)
        return lax.fori_loop(0, per_rank, step, zeros.astype(accumulator_type(zeros.dtype))).astype(zeros.dtype)

    return lax.cond(_overlaps(table), slice_by_slice, at_once, ct)


def _overlaps(table):
    """Whether two slices of some operand overlap. The same on all ranks."""
    starts, sizes = table[:, 0], table[:, 1]
    starts = jnp.where(sizes > 0, starts, jnp.iinfo(table.dtype).max)  # empty slices come last
    order = jnp.argsort(starts, axis=1)
    starts, sizes = (jnp.take_along_axis(x, order, axis=1) for x in (starts, sizes))
    return jnp.any((starts[:, 1:] - starts[:, :-1] < sizes[:, :-1]) & (sizes[:, 1:] > 0))


def _transpose_output(ct, table, call):
    """The cotangent of the output: zero in the rows that were written."""
    back = _own_row(reverse(table), call)
    starts, sizes = back[0], back[1]
    changes = jnp.zeros(ct.shape[0] + 1, table.dtype).at[starts].add((sizes > 0).astype(table.dtype))
    changes = changes.at[starts + sizes].add(-(sizes > 0).astype(table.dtype))
    written = jnp.cumsum(changes)[:-1] > 0
    return jnp.where(written.reshape(-1, *[1] * (ct.ndim - 1)), jnp.zeros_like(ct), ct)


def _batch(axis_data, args, dims, *, call):
    if axis_data.name in call.axes:
        raise NotImplementedError(f"{call.op}: {axis_data.name!r} is an axis of vmap, expected axes of a mesh")
    if all(d is None for d in dims):
        return all_to_all_v_p.bind(*args, call=call), None
    size = axis_data.size
    operand, output, table = (
        jnp.broadcast_to(x[None], (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    )
    if dims[2] is None:  # the batch is part of the rows
        rows = (jnp.moveaxis(x, 0, 1) for x in (operand, output))
        return all_to_all_v_p.bind(*rows, args[2], call=call), 1
    # The batch is merged into the rows, and every slice becomes `size` slices.
    steps = jnp.array([operand.shape[1], 0, output.shape[1], 0], table.dtype)
    shifts = jnp.arange(size, dtype=table.dtype)[:, None, None, None] * steps[None, None, :, None]
    table = jnp.moveaxis(table + shifts, 0, -1).reshape(*table.shape[1:3], -1)
    merged = (lax.collapse(x, 0, 2) for x in (operand, output))
    result = all_to_all_v_p.bind(*merged, table, call=call)
    return result.reshape(output.shape), 0


all_to_all_v_p = register("all_to_all_v", shape=_shape, lower=_lower, jvp=_jvp, transpose=_transpose, batch=_batch)
