"""Floating-point operations and bytes of the equations of a jaxpr."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

# No work, or part of the code of whatever uses the result.
FREE = {
    "reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "pcast", "axis_index", "jaxcomm_done",
    "broadcast_in_dim", "iota", "sharding_constraint", "mesh_cast", "reshard", "optimization_barrier",
    "bitcast_convert_type", "random_wrap", "random_unwrap", "name", "symbolic_zeros", "create_token", "split",
}  # fmt: skip
# Reads as many bytes of its first operand as it returns.
_PARTS = ("slice", "dynamic_slice", "gather", "rev")
# Changes its first operand in place.
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2, "scatter-max": 2,
            "scatter-min": 2, "scatter-mul": 2, "scatter_mul": 2}  # fmt: skip


def bytes_of(aval: Any) -> float:
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return float(math.prod(shape)) * getattr(dtype, "itemsize", 4) if dtype is not None else 0.0


def bytes_read(equation: Any) -> list[float]:
    """Bytes that an equation reads of each operand."""
    sizes = [bytes_of(v.aval) for v in equation.ins]
    if equation.name in _PARTS and sizes:
        sizes[0] = min(sizes[0], bytes_of(equation.outs[0].aval))
    return sizes


def _contraction(left: Any, right: Any, dimension_numbers: Any) -> float:
    (_, contract), (_, batch) = dimension_numbers
    rest = [d for i, d in enumerate(right.shape) if i not in contract and i not in batch]
    return float(2 * math.prod(left.shape) * math.prod(rest))


def valid_positions(size: int, kernel: int, out: int, stride: int, low: int, base: int, window: int) -> int:
    """Pairs of an output and a kernel element along one dimension whose input element exists.

    `low` is the padding before the input; `base` and `window` dilate input and kernel. Padding and the holes of a
    dilated input take no operations.
    """
    at = np.arange(kernel)[:, None] * window - low  # input position of output 0, in the dilated input
    first = np.arange(min(base, out))[None]  # outputs repeat with this period
    start, last = at + first * stride, (size - 1) * base
    step = base * stride
    lowest = np.maximum(-(start // step), 0)
    highest = np.minimum((last - start) // step, (out - 1 - first) // base)
    return int(np.where(start % base == 0, np.maximum(highest - lowest + 1, 0), 0).sum())


def _convolution(params: Any, left: Any, kernel: Any, out: Any) -> float:
    """The kernel holds in_features / groups already, and the result batch / groups."""
    numbers = params["dimension_numbers"]
    flops = 2.0 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    for d, (stride, (low, _), base, window) in enumerate(
        zip(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True)
    ):
        size, width, results = (shape[spec[2 + d]] for shape, spec in zip((left, kernel, out), numbers, strict=True))
        flops *= valid_positions(size, width, results, stride, low, base, window)
    return float(flops)


def product(equation: Any) -> tuple[float, float, str] | None:
    """Operations, bytes and element type of an equation that is a kernel of its own; None if it can be fused."""
    name, ins, outs = equation.name, [v.aval for v in equation.ins], [v.aval for v in equation.outs]
    moved = sum(map(bytes_of, ins)) + sum(map(bytes_of, outs))
    if name == "dot_general":
        return _contraction(ins[0], ins[1], equation.params["dimension_numbers"]), moved, str(ins[0].dtype)
    if name == "conv_general_dilated":
        return _convolution(equation.params, ins[0].shape, ins[1].shape, outs[0].shape), moved, str(ins[0].dtype)
    if name in ("ragged_dot", "ragged_dot_general"):  # each row meets the weights of one group
        flops = 2.0 * math.prod(ins[0].shape) * outs[0].shape[-1]
        return flops, moved, str(ins[0].dtype)
    if name in _UPDATES:
        return 0.0, 2 * sum(map(bytes_of, ins[_UPDATES[name] :][:1])), ""
    if name == "gather":
        return 0.0, 2 * bytes_of(outs[0]) + sum(map(bytes_of, ins[1:])), ""
    if name in ("sort", "top_k", "fft", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "ffi_call",
                "pure_callback", "io_callback", "custom_call", "triangular_solve", "cholesky"):  # fmt: skip
        return 0.0, moved, ""
    return None


def collective_matmul(name: str, equation: Any) -> float:
    """Operations of an all_gather_matmul or a matmul_psum_scatter on one rank."""
    ins, outs = [v.aval for v in equation.ins], [v.aval for v in equation.outs]
    if name == "matmul_psum_scatter":
        half = len(ins) // 2
        return float(sum(2 * math.prod(x.shape) * w.shape[-1] for x, w in zip(ins[:half], ins[half:], strict=True)))
    x, weights = ins[0], equation.params["num_weights"]
    sizes = [math.prod(aval.shape) for aval in (*outs[:weights], *ins[1 + weights :])]
    return float(2 * sum(sizes) * x.shape[-1])


def route_and_dispatch(equation: Any) -> list[tuple[str, int]]:
    """Exchanges of a route_and_dispatch, with the bytes of a rank: counts, and each choice of a row.

    The exchange in one kernel is predicted as if it were these two.
    """
    ids, rows = equation.ins[0].aval, sum(bytes_of(value.aval) for value in equation.ins[1:])
    counts = equation.params["call"].num_experts + 1
    return [("all_gather", 4 * counts), ("ragged_all_to_all", int(rows * ids.shape[1]))]


def parts(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                found.append(part)
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for part in parts(eqn):
            yield from _equations(part)


def exchanges(jaxpr: Any) -> bool:
    """Whether the body of a pallas_call synchronizes with other devices."""
    return any(eqn.primitive.name in ("get_barrier_semaphore", "semaphore_signal") for eqn in _equations(jaxpr))


def product_type(jaxpr: Any) -> str:
    """Element type of the left operand of the first product; "" without products."""
    return next((str(e.invars[0].aval.dtype) for e in _equations(jaxpr) if e.primitive.name == "dot_general"), "")


def products_in(jaxpr: Any, while_trips: int) -> float:
    """Operations of the products of a jaxpr. The branch of a cond with most of them counts."""
    flops = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, inside = eqn.primitive.name, [products_in(part, while_trips) for part in parts(eqn)]
        if name == "dot_general":
            flops += _contraction(eqn.invars[0].aval, eqn.invars[1].aval, eqn.params["dimension_numbers"])
        elif name == "cond":
            flops += max(inside, default=0.0)
        else:
            flops += {"scan": eqn.params.get("length", 1), "while": while_trips}.get(name, 1) * sum(inside)
    return flops
