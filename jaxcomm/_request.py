"""Calls of an op as explain() and the simulator describe them, their Resolution, and a list of those of a program."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcomm import _check
from jaxcomm._core import plan
from jaxcomm._dtypes import in_bytes, to_reduce

ROWS = {row.name: row for row in plan.collectives()}
# Public name -> native name.
FUNCTIONS = {function: row.name for row in plan.collectives() for function in row.functions}
# Two shardings describe their operands.
OF_BOXES = {op: name for op, name in FUNCTIONS.items() if ROWS[name].elements == "boxes"}
_OTHERS = {op: name for op, name in FUNCTIONS.items() if op not in OF_BOXES}
# Names of jax.lax.
NATIVE = {op: name for op, name in _OTHERS.items() if "." not in op and not op.endswith("_start")}
# Of jaxcomm.moe: their payloads have a row per token.
MOE = {op: name for op, name in _OTHERS.items() if op.startswith("moe.")}
# Ops that can be started, by the names of their start functions.
STARTS = {op: name for op, name in _OTHERS.items() if op.endswith("_start")}


def native_name(op: str) -> str:
    names = NATIVE | STARTS
    if op not in names:
        raise ValueError(f"op must be one of {', '.join(names)}, got {op!r}")
    return names[op]


def splits_operand(op: str) -> bool:
    """Whether the operand is an array of n equal blocks."""
    row = ROWS[FUNCTIONS[op]]
    return (row.elements, row.input) == ("array", "per_rank")


def sizes_of(op: str, axis_sizes: int | Sequence[int] | None) -> tuple[int, ...]:
    sizes: tuple[Any, ...] = (axis_sizes,) if isinstance(axis_sizes, int | None) else tuple(axis_sizes)
    if not all(isinstance(size, int | np.integer) for size in sizes):
        raise TypeError(f"{op}: axis_sizes must be an integer or a sequence of them, got {axis_sizes!r}")
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"{op}: axis_sizes must be positive, got {axis_sizes!r}")
    return sizes


def call_of(
    op: str,
    x: Any,
    n: int,
    *,
    source: int = 0,
    perm: Sequence[tuple[int, int]] | None = None,
    algorithm: str | None = None,
    max_sms: int | None = None,
    ranks_per_node: int = 1,
) -> tuple[dict[str, Any], str, tuple[int, int]]:
    """A call of an op as plan.resolve gets it: attributes, element type, and elements of operand and result.

    Args:
      op: public name.
      x: operand of one rank; ignored for "barrier".
      n: number of ranks.
      source: rank that broadcasts.
      perm: pairs of a permutation; None means a shift by one.
      algorithm, max_sms: as in the op.
      ranks_per_node: as the axes declare.
    """
    row = ROWS[FUNCTIONS[op]]
    if row.input != "none" and not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{op}: x must be an array or a jax.ShapeDtypeStruct, got {x!r}")
    if row.input != "none":
        _check.element_type(op, x, ordered=op in ("pmax", "pmin"), booleans=row.name != "reduce_scatter")
    if "root" in row.attributes:
        source = _check.rank(op, "source", source, n)
    count = 0 if row.input == "none" else math.prod(x.shape)
    if splits_operand(row.functions[0]) and count % n:
        raise ValueError(f"{op}: {count} elements cannot be split into {n} equal blocks")
    source_of = []
    if "source_of" in row.attributes:
        source_of = [-1] * n
        shift = [(r, (r + 1) % n) for r in range(n)]
        for src, dst in shift if perm is None else _check.permutation(op, perm, n):
            source_of[dst] = src
    attributes = {
        "algorithm": algorithm or "",
        "group_size": n,
        "ranks_per_node": ranks_per_node,
        "max_sms": max_sms or 0,
        "root": source,
        "source_of": source_of,
        "asynchronous": int(op in STARTS),
    }
    result = count
    if row.elements == "array" and row.input != row.output:
        result = count * n if row.output == "per_rank" else count // n
    dtype = np.dtype(np.float32) if row.input == "none" else jnp.dtype(x.dtype)
    if row.reduces:
        dtype = jnp.dtype(to_reduce(np.int32 if dtype == np.bool_ else dtype))
    return attributes, str(jnp.dtype(in_bytes(dtype))), (count, result)


def planned(
    op: str,
    native: str,
    call: tuple[dict[str, Any], str, tuple[int, int]],
    placement: plan.Placement,
    able: plan.Capabilities,
    **rows: int,
) -> plan.Resolution:
    """The Resolution of a call that jaxcomm's plans run.

    Args:
      op, native: public and native name.
      call: as call_of returns it.
      placement, able: as plan.resolve takes them.
      rows: `choices` and `list_bytes` of plan.resolve.

    Raises:
      ValueError: no plan fits, or XLA's own collectives run the call.
    """
    attributes, dtype, counts = call
    try:
        found = plan.resolve(native, attributes, dtype, *counts, placement, able, **rows)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{op}: {error}") from None
    if found.backend not in ("plan", "rows"):
        raise ValueError(
            f"{op}: algorithm {found.algorithm!r} runs ({found.reason}); it has no plan, because it runs XLA's own "
            "collectives"
        )
    return found


_list: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("list", default=None)


@contextlib.contextmanager
def resolutions() -> Iterator[list[tuple[Any, plan.Resolution]]]:
    """Lists the calls (_lowering.Call) that this thread lowers meanwhile, and what runs each of them."""
    found: list[tuple[Any, plan.Resolution]] = []
    token = _list.set(found)
    try:
        yield found
    finally:
        _list.reset(token)


def add_to_list(call: Any, resolution: plan.Resolution) -> bool:
    """Adds a call to the list of resolutions(). Returns whether there is one."""
    found = _list.get()
    if found is not None:
        found.append((call, resolution))
    return found is not None
