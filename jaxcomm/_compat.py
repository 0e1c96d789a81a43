"""Everything that depends on the JAX version or on JAX API that may change.

Written for jax 0.10.2 to 0.12. `jax.interpreters` and `jax.extend` promise no stability. Two functions read private
state (`jax._src`) and return False if it is missing. _processes/kv_store.py uses the private distributed client.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jaxlib
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib import xla_client
from jaxlib.mlir import ir

from jaxcomm._typing import AxisNames, Groups

__all__ = [
    "Primitive",
    "ad",
    "back_ends_have_started",
    "batch_like",
    "batching",
    "dot_general_type",
    "equally_varying",
    "frames_of",
    "has_windows",
    "in_collective_memory",
    "in_spmd_region",
    "is_exported",
    "is_tracer",
    "leave_compilation_cache",
    "lower_named",
    "make_varying",
    "mlir",
    "number_in_program",
    "on_cloud_tpu",
    "on_communication_stream",
    "provides_communicators",
    "psum_of_groups",
    "put_shards",
    "unbound_axis",
    "unreduced_axes",
    "varying_axes",
    "with_varying",
    "zero_tangent",
]


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def varying_axes(aval_or_x: Any) -> frozenset:
    """Mesh axes over which the type of a value is varying; empty under check_vma=False."""
    aval = aval_or_x if hasattr(aval_or_x, "manual_axis_type") else jax.typeof(aval_or_x)
    return aval.manual_axis_type.varying


def unreduced_axes(x: Any) -> frozenset:
    """Mesh axes over which the type of a value is unreduced: a pending sum."""
    return jax.typeof(x).manual_axis_type.unreduced


def with_varying(aval: Any, axes: frozenset) -> Any:
    """`aval` with another set of varying axes."""
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=axes))


def make_varying(x: Any, axes: AxisNames) -> Any:
    """Types `x` as varying over `axes`. Does nothing under check_vma=False and for axes of vmap."""
    # The type of an axis index varies over its own axis only, or over no axis where types don't track this.
    missing = tuple(a for a in axes if varying_axes(lax.axis_index(a)) - varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def equally_varying(*xs: Any) -> tuple:
    """Types all values as varying over the axes over which one of them varies."""
    axes = frozenset().union(*map(varying_axes, xs))
    missing = [tuple(axes - varying_axes(x)) for x in xs]
    return tuple(lax.pcast(x, m, to="varying") if m else x for x, m in zip(xs, missing, strict=True))


def zero_tangent(x: Any) -> Any:
    """The symbolic zero in place of the tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def psum_of_groups(x: Any, axes: AxisNames, axis_index_groups: Groups) -> Any:
    """jax.lax.psum with axis_index_groups, also under check_vma=True, where jax.lax.psum rejects them."""
    y = lax.psum_p.bind(x, axes=axes, axis_index_groups=axis_index_groups)
    return y[0] if lax.psum_p.multiple_results else y


def leave_compilation_cache() -> bool:
    """Switches JAX's persistent compilation cache off. Returns False if it was off already."""
    settings: Any = jax.config
    if not (settings.jax_enable_compilation_cache and settings.jax_compilation_cache_dir):
        return False
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # otherwise JAX keeps using the cache that it has opened
    return True


def dot_general_type(a: Any, b: Any, contract: tuple, batch: tuple, dtype: Any) -> Any:
    """Type of jax.lax.dot_general of two avals: contracted dimensions of each, batch dimensions of both."""
    types = lax.dot_general_p.abstract_eval(
        a,
        b,
        dimension_numbers=(contract, (batch, batch)),
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )
    return types[0]


def put_shards(aval: Any, sharding: Any, shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """The array of these shards, as jax.make_array_from_callback makes it, in a quarter of its time."""
    return xla_client.batched_device_put(aval, sharding, shards, devices)


def back_ends_have_started() -> bool:
    """Whether JAX has started its back ends. Unlike jax.devices(), this does not start them."""
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def on_cloud_tpu() -> bool:
    """Whether JAX will use the TPUs of this machine."""
    try:
        from jax._src import cloud_tpu_init

        platforms = getattr(jax.config, "jax_platforms", None) or "tpu"
        return bool(cloud_tpu_init.running_in_cloud_tpu_vm) and "tpu" in platforms
    except (ImportError, AttributeError):
        return False


def unbound_axis(name: Any) -> bool:
    """Whether no enclosing shard_map or vmap binds `name`."""
    try:
        lax.axis_size(name)
    except NameError:
        return True
    return False


def in_spmd_region(axis_context: Any) -> bool:
    """Whether a lowering happens inside shard_map."""
    return isinstance(axis_context, mlir.SPMDAxisContext)


def lower_named(run: Callable[..., Any], name: str, ctx: Any, *xs: Any) -> Any:
    """Lowers run(*xs) to the operations of a rule. Profiles show its calls of jax.ffi under this name.

    XLA names an operation after the last part of its location, which would be ffi_call.
    """
    with_scope = jax.named_scope(name)(run)
    operations = ir.InsertionPoint.current.block.operations
    before = len(operations)
    results = mlir.lower_fun(with_scope, multiple_results=True)(ctx, *xs)
    _name_calls(itertools.islice(operations, before, None), name)
    return results


def _name_calls(operations: Iterable[Any], name: str) -> None:
    """Also those in regions: under a mesh with axes that are not manual, a call is in a shard_map of its own."""
    for operation in operations:
        if operation.name == "stablehlo.custom_call" and 'ffi_call"' in str(operation.location):
            operation.location = ir.Location.name(name)
        for block in itertools.chain.from_iterable(operation.regions):
            _name_calls(block.operations, name)


def _jaxlib() -> tuple[int, ...]:
    """Version of jaxlib, which is also that of its plugins."""
    return tuple(int(part) for part in re.findall(r"\d+", jaxlib.__version__)[:3])


def provides_communicators() -> bool:
    """Whether XLA:GPU provides its communicators to FFI handlers."""
    return _jaxlib() >= (0, 11, 2)


def is_exported(ctx: Any) -> bool:
    """Whether a lowering is that of jax.export, so that other devices than those of its mesh may run the program."""
    return bool(getattr(getattr(ctx.module_context, "lowering_parameters", None), "for_export", False))


def number_in_program(ctx: Any, key: Any) -> int:
    """How often this function has been called with `key` in the lowering of one program."""
    # A program's lowering has this dictionary for lowerings that primitives share. JAX's keys differ from this one.
    found = getattr(ctx.module_context, "cached_primitive_lowerings", {})
    number = found.get((number_in_program, key), 0)
    found[(number_in_program, key)] = number + 1
    return int(number)


def has_windows() -> bool:
    """Whether XLA:GPU makes windows on its own buffers for FFI handlers."""
    return _jaxlib() >= (0, 12)


def in_collective_memory(operands: Sequence[int], results: Sequence[int]) -> contextlib.AbstractContextManager:
    """Context in which XLA:GPU allocates operands and results of custom calls in memory that can have windows."""
    numbers = {"operands_memory_spaces": operands, "results_memory_spaces": results}
    spaces = {name: ",".join(f"{i}:1" for i in which) for name, which in numbers.items() if which}
    return set_xla_metadata(**{name: f"{{{text}}}" for name, text in spaces.items()})


def on_communication_stream(call: Callable[..., list[Any]], *xs: Any) -> list[Any]:
    """call(*xs) as a function of its own in the program, which XLA:GPU runs on its stream for collectives.

    XLA makes async-start and async-done of a call with the first attribute, and does not inline a call with the second.
    It may run other operations between the two.
    """
    ys = jax.jit(call)(*xs)
    # One of the results is enough: the attributes are of the operation that has all of them.
    return [set_xla_metadata(ys[0], _xla_stream_annotation="collective", inlineable="false"), *ys[1:]]


def batch_like(primitive: Any, axis_data: Any, x: Any, dimension: int | None, **params: Any) -> tuple:
    """Applies JAX's own batching rule of one of its collectives."""
    return batching.fancy_primitive_batchers[primitive](axis_data, (x,), (dimension,), **params)


def frames_of(source_info: Any) -> list[tuple[str, int, str]]:
    """File, line and function of each frame in which an equation of a jaxpr was made, innermost first."""
    traceback = getattr(source_info, "traceback", None)
    frames = traceback.frames if traceback is not None else ()
    return [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]
