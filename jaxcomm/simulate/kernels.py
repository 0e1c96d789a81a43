"""Floating-point operations and bytes of the equations of a jaxpr."""

import math
from typing import Any

# No work, or part of the code of whatever uses the result.
_FREE = {
    "reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "pcast", "axis_index", "jaxcomm_done",
    "broadcast_in_dim", "iota", "sharding_constraint", "mesh_cast", "reshard", "optimization_barrier",
    "bitcast_convert_type", "random_wrap", "random_unwrap", "name", "symbolic_zeros", "create_token", "split",
}  # fmt: skip
# Reads as many bytes of its first operand as it returns.
_PARTS = ("slice", "dynamic_slice", "gather", "rev")
# Changes its first operand in place.
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2, "scatter-max": 2,
            "scatter-min": 2, "scatter-mul": 2, "scatter_mul": 2}  # fmt: skip


def costs(name: str) -> bool:
    """Whether a primitive takes time."""
    return name not in _FREE


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


def product(equation: Any) -> tuple[float, float, str] | None:
    """Operations, bytes and element type of an equation that is a kernel of its own; None if it can be fused."""
    name, ins, outs = equation.name, [v.aval for v in equation.ins], [v.aval for v in equation.outs]
    moved = sum(map(bytes_of, ins)) + sum(map(bytes_of, outs))
    if name == "dot_general":
        return _contraction(ins[0], ins[1], equation.params["dimension_numbers"]), moved, str(ins[0].dtype)
    if name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        kernel = ins[1].shape
        per_output = math.prod(kernel) / kernel[numbers.rhs_spec[0]]  # the kernel holds in_features / groups already
        flops = 2.0 * math.prod(outs[0].shape) * per_output / equation.params.get("batch_group_count", 1)
        return flops, moved, str(ins[0].dtype)
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
