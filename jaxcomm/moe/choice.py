"""Every decision about the lowering of jaxcomm.moe: which code moves the rows, and whether kernels take the sizes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _lowering
from jaxcomm._lowering import Call


class Sizes(NamedTuple):
    """Sizes of a call on each rank.

    Attributes:
      num_ranks: n.
      tokens: T.
      choices: K.
      num_experts: E.
    """

    num_ranks: int
    tokens: int
    choices: int
    num_experts: int


class Sum(NamedTuple):
    """What combine adds for each token.

    Attributes:
      dtype: element type of the rows.
      weighted: whether each row has a weight.
      order: "node" or "home", see `reduce` of route().
    """

    dtype: Any
    weighted: bool
    order: str


class Choice(NamedTuple):
    """How a dispatch or combine is lowered.

    Attributes:
      call: the arguments of the call. It has the name of the algorithm if kernels between nodes move the rows: NCCL may
        find nodes where Python sees none.
      moves_natively: jaxcomm's own dispatch and combine move the rows, not XLA's ragged_all_to_all.
      adds_natively: jaxcomm's own combine adds the rows of a token, not XLA's program.
      ranks_per_node: ranks per node, for sums by node; 0 without sums.
    """

    call: Any
    moves_natively: bool
    adds_natively: bool = False
    ranks_per_node: int = 0


def choose(ctx: Any, platform: str, call: Any, sizes: Sizes, total: Sum | None) -> Choice:
    """Chooses for a dispatch or combine that is being lowered.

    Args:
      ctx: lowering context.
      platform: "cpu", "cuda" or "other".
      call: the RouteCall of the op.
      sizes: sizes of the call.
      total: the sum of a combine; None for dispatch and for rows per choice.

    Raises:
      NotImplementedError: no code can move the rows, or detect an overflow that must raise.
    """
    between_nodes = False
    if platform == "cpu":
        if _lowering.uses_xla(call, platform):
            raise NotImplementedError(
                f"{call.op} at {call.site}: XLA has no ragged_all_to_all on CPUs; remove algorithm='xla' and "
                "JAXCOMM_ALGORITHM=xla"
            )
        native = True
    else:
        if platform == "cuda" and call.algorithm == "hierarchical" and sizes.num_ranks == 1:
            call = dataclasses.replace(call, algorithm="direct")  # no plan has nodes there
        between_nodes = _uses_rails(ctx, platform, call, sizes)
        # A program for several hosts runs on one, where "hierarchical" is "direct" (ffi/cuda/program/call_program.cc).
        in_node = _lowering.uses_row_kernel(ctx, call, platform, names=("direct", "hierarchical"))
        native = between_nodes or in_node
        if not native and call.raises:
            _refuse_raise(ctx, platform, call, sizes)
        if between_nodes:
            call = dataclasses.replace(call, algorithm="hierarchical")
    if total is None:
        return Choice(call, native)
    per_node = _lowering.ranks_per_node_of(ctx, call, platform)
    if platform == "cpu":
        adds = _adds_on_cpus(total)
    else:
        # The kernel between nodes adds node by node; the kernel inside a node does not.
        in_order = between_nodes or total.order == "home" or per_node == sizes.num_ranks
        adds = native and in_order and str(total.dtype) in _FLOATS
    return Choice(call, native, adds, per_node)


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _adds_on_cpus(total: Sum) -> bool:
    """Whether the executor adds rows of this type: floats with or without weights, others without."""
    if str(total.dtype) in _FLOATS:
        return True
    in_node_order = total.order == "node" and jnp.issubdtype(total.dtype, jnp.inexact)
    return not total.weighted and not in_node_order and total.dtype.itemsize > 1


def _uses_rails(ctx: Any, platform: str, call: Any, sizes: Sizes) -> bool:
    """Whether the kernels between nodes move the rows. By default, other sizes travel by XLA's collective."""
    if not _lowering.uses_rails(ctx, call, platform):
        return False
    return call.algorithm is not None or fits_rails(sizes.tokens, sizes.choices, sizes.num_experts)


# The limits of ffi/cuda/program/rail_row_args.h: shared memory of a thread block, and its part for copied rows, between
# nodes and inside one: the kernel depends on what NCCL finds.
_MOST_SHARED_BYTES, _MOVES_BYTES, _MOVES_IN_NODE_BYTES = 48 << 10, 12 << 10, 16 << 10


def fits_rails(tokens: int, choices: int, num_experts: int) -> bool:
    """Whether the kernels between nodes take these sizes, also in the gradient, which dispatches a row per choice."""
    marks = 12 * -(-tokens * choices // 64)
    each, sums = 4 * choices + 16, 4 * num_experts
    between_nodes = max(_MOVES_BYTES, each) + sums + 16 + marks
    return max(between_nodes, max(_MOVES_IN_NODE_BYTES, each) + sums) <= _MOST_SHARED_BYTES


def _refuse_raise(ctx: Any, platform: str, call: Any, sizes: Sizes) -> None:
    if _lowering.uses_rails(ctx, call, platform):
        raise NotImplementedError(
            f"{call.op} at {call.site}: {sizes.tokens * sizes.choices} choices of a rank and {sizes.num_experts} "
            "experts do not fit into the shared memory of jaxcomm's kernels between nodes, and without them "
            "on_overflow='raise' does not work; pass on_overflow='drop' and look at Routing.dropped"
        )
    refuse_unchecked(call)


def refuse_unchecked(call: Call) -> None:
    """Raises for a call whose overflow nothing would detect."""
    raise NotImplementedError(
        f"{call.op} at {call.site}: on_overflow='raise' works on CPUs, and on GPUs with jaxcomm's own dispatch and "
        "combine (between nodes algorithm='hierarchical'); pass on_overflow='drop' and look at Routing.dropped"
    )


def assigns_by_custom_calls(platform: str, call: Call) -> bool:
    """Whether row_assignment.py lowers to custom calls. An algorithm does not concern work of one rank."""
    return platform == "cpu" and not _lowering.uses_xla(dataclasses.replace(call, algorithm=None), platform)


# Up to this size of a rank's rows, one exchange of all rows costs less than two exchanges. Measured on AMD EPYC (2
# cores, rows of 4 KiB, 2026-11): with 8 processes of one device, 1 to 8 tokens gain a sixth and 32 tokens nothing. In
# one process, an exchange costs little, and only 1 token gains.
LARGEST_ROWS, LARGEST_ROWS_IN_ONE_PROCESS = 32 << 10, 4 << 10
# On GPUs, by the cost model, not measured: for 8 choices of 256 experts on 8 GPUs, the flags of LL messages then cost
# 7 us if dispatch sends a row once per rank. The exchange saves an all_gather and the barriers of dispatch, 9 us, and
# the sort of the ids, which the model does not have.
LARGEST_ROWS_ON_GPUS = 512 << 10


def takes_one_message(size_bytes: int, named: bool) -> bool:
    """Whether CPUs send all ids and rows at once; see choose_one_exchange().

    Args:
      size_bytes: of the rows of a rank.
      named: whether the user has named algorithm "one_shot".
    """
    return named or size_bytes <= (LARGEST_ROWS_IN_ONE_PROCESS if jax.process_count() == 1 else LARGEST_ROWS)


def choose_one_exchange(ctx: Any, platform: str, call: Any, sizes: Sizes, *, row_bytes: int, named: bool) -> str | None:
    """Chooses how route_and_dispatch sends ids and rows at once.

    Args:
      ctx: lowering context.
      platform: "cpu", "cuda" or "other".
      call: the RouteCall, without an algorithm.
      sizes: sizes of the call.
      row_bytes: bytes of the row of a token.
      named: whether the user has named algorithm "one_shot", so that sizes do not matter that only cost more.

    Returns:
      "messages" for an all_gather of ids and rows, "kernel" for the kernel of GPUs, or None for route and dispatch.
    """
    if _lowering.uses_xla(call, platform):
        return None
    size = sizes.tokens * row_bytes
    if platform == "cpu":
        return "messages" if takes_one_message(size, named) else None
    if size > LARGEST_ROWS_ON_GPUS and not named:
        return None
    fits = call.capacity > 0 and fits_kernel(sizes, row_bytes) and _lowering.uses_row_kernel(ctx, call, platform)
    return "kernel" if fits else None


# The limits of ffi/cuda/program/moe_one_shot_args.cc.
_MOST_ARENA_BYTES, _MOST_EXPERTS = 64 << 20, 2**15 - 1
_MOST_CHANNELS = 1024  # of any GPU: more than its multiprocessors


def fits_kernel(sizes: Sizes, row_bytes: int) -> bool:
    """Whether the kernel of route_and_dispatch takes these sizes, whatever its number of thread blocks."""
    n, tokens, choices, num_experts = sizes
    if min(tokens, choices, row_bytes) < 1 or num_experts > _MOST_EXPERTS:
        return False
    ids = -(-tokens * choices // 4)  # units of 8 bytes
    shared = 16 * n * ids + 4 * n * (num_experts + 1) + 12 * num_experts
    # A thread block has the ids, and of each row a multiple of 128 bytes: at most twice its share.
    lines = -(-row_bytes // 128)
    most = min(lines, max(tokens * row_bytes >> 14, 1), _MOST_CHANNELS)  # thread blocks
    units = most * ids + 2 * tokens * lines * 16
    arena = 8 * _MOST_CHANNELS + 2 * n * units * 16
    return shared <= _MOST_SHARED_BYTES and arena <= _MOST_ARENA_BYTES
