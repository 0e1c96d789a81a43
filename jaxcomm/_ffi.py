"""FFI targets of users, whose kernels communicate with the device API.

jaxcomm/host.h provides their handlers with a communicator.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm import _check, _compat, _lowering, _native
from jaxcomm._core import plan
from jaxcomm._processes import bootstrap, liveness, placement


def register_ffi_target(name: str, library: ctypes.CDLL, *, initialize: str, execute: str) -> None:
    """Registers a CUDA target like jax.ffi.register_ffi_target, for handlers that use jaxcomm/host.h.

    Call it in all processes, before a program with the target is compiled or loaded from a cache. It registers nothing
    if JAX has no CUDA back end.

    Args:
      name: name of the target, for ffi_call. Calls of one target share an arena (jaxcomm::host::Setup::Reserve).
      library: library with the handlers, as ctypes.CDLL(path); it must stay loaded.
      initialize: symbol of the handler for the stage Initialize. If it fails, Execute raises the error: XLA ends a
        process if only one of several devices fails in Initialize.
      execute: symbol of the handler for the stage Execute, which must have jaxcomm::host::Call.

    Raises:
      AttributeError: the library has no such symbol, or was compiled without jaxcomm/host.h.
      RuntimeError: the library was compiled with headers of another version of jaxcomm.
      ImportError: jaxcomm was built without CUDA.
    """
    module = _native.cuda()
    handlers = {"initialize": library[initialize], "execute": library[execute]}
    try:
        use_host_api = library.jaxcomm_use_host_api
    except AttributeError:
        raise AttributeError(
            f"{library._name} was compiled without jaxcomm/host.h: include it in a source file of the library"
        ) from None
    use_host_api.argtypes, use_host_api.restype = [ctypes.c_void_p], ctypes.c_char_p
    if (version := use_host_api(module.host_api())) is not None:
        raise RuntimeError(
            f"{library._name} was compiled with the headers of jaxcomm {version.decode()}, but jaxcomm "
            f"{importlib.metadata.version('jaxcomm')} is installed: compile it again"
        )
    if liveness.register_cuda():
        module.set_user_initialize(name, ctypes.cast(handlers["initialize"], ctypes.c_void_p).value)
        stages = module.user_stages() | {"execute": jax.ffi.pycapsule(handlers["execute"])}
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def ffi_call(
    target_name: str,
    result_shape_dtypes: Any,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    max_sms: int | None = None,
    has_side_effect: bool = True,
    operand_windows: Sequence[int] = (),
    result_windows: Sequence[int] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Like jax.ffi.ffi_call, for a target of register_ffi_target inside jax.shard_map.

    All ranks of a group must make the same calls in the same order, with arrays of the same shapes.

    Args:
      target_name: name under which the target was registered.
      result_shape_dtypes: shape and dtype of the result, or a sequence of them, on one device.
      axis_name: mesh axis, or tuple of axes, outermost first. It defines the ranks of a group and their order.
      axis_index_groups: lists of ranks of equal size that form the groups; None means one group of all.
      max_sms: the most thread blocks that the call may launch per GPU (jaxcomm::host::Call::max_channels); None means
        JAXCOMM_MAX_SMS, which is an upper limit in any case.
      has_side_effect: as in jax.ffi.ffi_call. If False, XLA may drop or merge calls; it must then do the same on all
        devices.
      operand_windows: numbers of the operands that kernels of the node's other ranks read
        (jaxcomm::host::Call::Window); at most 8 with those of `result_windows`. Where peers can't address the buffers
        of XLA, as without JAXCOMM_SYMMETRIC_BUFFERS=1, jaxcomm::host::Setup::CheckWindows returns the reason.
      result_windows: the same for results, in the order of the custom call, to which the other ranks write.
      options: further arguments of jax.ffi.ffi_call.

    Returns:
      A function of arrays and attributes, like that of jax.ffi.ffi_call. The handlers get the attributes as a
      dictionary (`.Attrs()`) that also holds `jaxcomm` and `jaxcomm_groups`. Under check_vma=True, the types of the
      results are invariant over the mesh axes unless `result_shape_dtypes` declares otherwise.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map.
      ValueError: invalid groups, a mesh axis that is not manual, or too many windows, of a negative number or twice the
        same (when tracing).
      TypeError: a window that is no integer (when tracing).
      IndexError: a window of an operand or result that the call does not have (when tracing).
      NotImplementedError: an axis belongs to vmap.
    """
    axes = _check.axes(target_name, axis_name)
    groups = _check.groups(target_name, axis_index_groups, axes)
    sms = _check.max_sms(target_name, max_sms)
    mesh = jax.sharding.get_abstract_mesh()
    if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
        raise NotImplementedError(f"{target_name}: {unknown[0]!r} is an axis of vmap, expected a mesh axis")
    if automatic := [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]:
        raise ValueError(
            f"{target_name}: the mesh axis {automatic[0]!r} must be manual: name it in axis_names of shard_map"
        )
    rows = _lowering.replica_groups(mesh.axis_names, mesh.axis_sizes, axes, groups)
    attributes = {
        "target": target_name,
        "site": _check.call_site(),
        "group_size": np.int64(rows.shape[1]),
        "max_sms": np.int64(sms or 0),
    }
    windows = {
        "operand": _window_numbers(target_name, "operand_windows", operand_windows),
        "result": _window_numbers(target_name, "result_windows", result_windows),
    }
    _check_windows(target_name, windows)
    call = jax.ffi.ffi_call(target_name, result_shape_dtypes, has_side_effect=has_side_effect, **options)

    def wrapped(*xs: Any, **more: Any) -> Any:
        # A custom call requires operands that vary over the same axes; jax.numpy makes them so too.
        xs = tuple(jax.numpy.asarray(x) for x in xs)
        varying = tuple(frozenset().union(*(_compat.varying_axes(x) for x in xs)))
        xs = tuple(_compat.make_varying(x, varying) for x in xs)

        def run(own: dict[str, Any], *xs: Any) -> Any:
            return call(*xs, jaxcomm=attributes, jaxcomm_groups=rows.reshape(-1).astype(np.int64), **own, **more)

        ys, tree = jax.tree.flatten(jax.eval_shape(lambda *xs: run({}, *xs), *xs))
        for name, numbers, arrays in (("operand", windows["operand"], xs), ("result", windows["result"], ys)):
            if numbers and max(numbers) >= len(arrays):
                raise IndexError(
                    f"{target_name}: {name}_windows has {max(numbers)}, but the call has {len(arrays)} {name}s"
                )
        return jax.tree.unflatten(tree, _user_call_p.bind(*xs, user_call=_UserCall(run, rows, windows)))

    return wrapped


def _window_numbers(target_name: str, argument: str, numbers: Any) -> tuple[int, ...]:
    try:
        found = list(numbers)
        if any(isinstance(number, bool) for number in found):
            raise TypeError
        return tuple(map(operator.index, found))
    except TypeError:
        raise TypeError(f"{target_name}: {argument} must be a sequence of integers, got {numbers!r}") from None


def _check_windows(target_name: str, windows: dict[str, tuple[int, ...]]) -> None:
    for name, numbers in windows.items():
        if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
            raise ValueError(f"{target_name}: {name}_windows must be different numbers from 0 on, got {list(numbers)}")
    if (count := sum(map(len, windows.values()))) > plan.MOST_WINDOWS:
        raise ValueError(f"{target_name}: a call can have {plan.MOST_WINDOWS} windows, got {count}")


class _UserCall:
    """A call of jax.ffi.ffi_call, made when a program is lowered: only then are the processes of its GPUs known.

    Attributes:
      run: (further attributes, *operands) -> results.
      rows: logical device ids of the groups.
      windows: numbers of the operands ("operand") and results ("result") that are to have windows.
    """

    def __init__(self, run: Callable[..., Any], rows: np.ndarray, windows: dict[str, tuple[int, ...]]):
        self.run, self.rows, self.windows = run, rows, windows

    def results(self, own: dict[str, Any], *xs: Any) -> list[Any]:
        return jax.tree.leaves(self.run(own, *xs))


def _shape(*xs: Any, user_call: _UserCall) -> Any:
    jaxpr = jax.make_jaxpr(functools.partial(user_call.results, {}))(*xs)
    return jaxpr.out_avals, jaxpr.effects


def _lower(ctx: Any, *xs: Any, platform: str, user_call: _UserCall) -> Any:
    own: dict[str, Any] = {}
    axis_context = ctx.module_context.axis_context
    if platform == "cuda" and _compat.in_spmd_region(axis_context) and not _compat.is_exported(ctx):
        processes = placement.gpu_processes(axis_context.mesh, user_call.rows)
        if processes is not None:  # else the GPUs of a process do not meet before the first run
            own["jaxcomm_processes"] = processes
    windows = {name: numbers for name, numbers in user_call.windows.items() if numbers}
    wanted = platform == "cuda" and bool(windows)
    if wanted:
        own |= {f"jaxcomm_{name}_windows": np.array(numbers, np.int64) for name, numbers in windows.items()}
    if wanted and (reason := bootstrap.no_windows(axis_context.mesh)) is not None:
        own["jaxcomm_no_windows"] = reason
        wanted = False

    def run(*xs: Any) -> Any:
        memory = _compat.in_collective_memory(user_call.windows["operand"], user_call.windows["result"])
        with memory if wanted else contextlib.nullcontext():
            return user_call.results(own, *xs)

    return _compat.mlir.lower_fun(run, multiple_results=True)(ctx, *xs)


def _batch(xs: Any, dimensions: Any, *, user_call: _UserCall) -> Any:
    def run(own: dict[str, Any], *xs: Any) -> Any:
        return jax.vmap(functools.partial(user_call.results, own), in_axes=tuple(dimensions))(*xs)

    ys = _user_call_p.bind(*xs, user_call=_UserCall(run, user_call.rows, user_call.windows))
    return ys, [0] * len(ys)


def _jvp(primals: Any, tangents: Any, *, user_call: _UserCall) -> Any:
    def array(tangent: Any) -> Any:
        is_zero = type(tangent) is _compat.ad.Zero
        return np.zeros(tangent.aval.shape, tangent.aval.dtype) if is_zero else tangent

    tangents = tuple(map(array, tangents))
    return jax.jvp(functools.partial(user_call.results, {}), primals, tangents)  # raises JAX's own error


_user_call_p = _compat.Primitive("jaxcomm_user_call")
_user_call_p.multiple_results = True
_user_call_p.def_effectful_abstract_eval(_shape)
_lowering.register_rule(_user_call_p, _lower)
_compat.ad.primitive_jvps[_user_call_p] = _jvp
_compat.batching.primitive_batchers[_user_call_p] = _batch
