"""FFI targets whose kernels communicate by the device API: jaxcomm/host.h gives their handlers a communicator."""

import ctypes
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcomm import _check, _compat, _lowering, _native


def register_ffi_target(name: str, library: ctypes.CDLL, *, initialize: str, execute: str) -> None:
    """Registers a CUDA target like jax.ffi.register_ffi_target, for handlers that use jaxcomm/host.h.

    Call it in all processes, before a program with the target is compiled or loaded from a cache. It registers nothing
    if JAX has no CUDA back end.

    Args:
      name: name of the target, for ffi_call. Calls of one target share an arena (jaxcomm::host::Setup::Reserve).
      library: the library that contains the handlers, as ctypes.CDLL(path); it must stay loaded.
      initialize: symbol of the handler for the stage Initialize. Execute reports its errors, because XLA ends a process
        if only one of several devices fails in Initialize.
      execute: symbol of the handler for the stage Execute, which must bind jaxcomm::host::Call.

    Raises:
      AttributeError: the library lacks a symbol, or no file of it includes jaxcomm/host.h.
      RuntimeError: the library was compiled with headers of another version of jaxcomm.
      ImportError: jaxcomm was built without CUDA.
    """
    module = _native.cuda()
    handlers = {"initialize": library[initialize], "execute": library[execute]}
    try:
        use_host_api = library.jaxcomm_use_host_api
    except AttributeError:
        raise AttributeError(f"{library._name}: nothing in it includes jaxcomm/host.h") from None
    use_host_api.argtypes, use_host_api.restype = [ctypes.c_void_p], ctypes.c_char_p
    if (version := use_host_api(module.host_api())) is not None:
        raise RuntimeError(
            f"{library._name} was compiled with the headers of jaxcomm {version.decode()}, but jaxcomm "
            f"{importlib.metadata.version('jaxcomm')} is installed: compile it again"
        )
    if _native.register_cuda():
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
    **options: Any,
) -> Callable[..., Any]:
    """Calls a target of register_ffi_target like jax.ffi.ffi_call, inside jax.shard_map, for the ranks of a group.

    All ranks of a group must make the same calls in the same order, with arrays of the same shapes.

    Args:
      target_name: name of the registered target.
      result_shape_dtypes: shape and dtype of the result, or a sequence of them, on one device.
      axis_name: mesh axis, or tuple of axes, outermost first: the ranks of a group, in this order.
      axis_index_groups: lists of ranks of equal size that form the groups; None means one group of all.
      max_sms: maximum number of thread blocks per GPU (jaxcomm::host::Call::max_channels). None means JAXCOMM_MAX_SMS,
        which is always an upper limit.
      has_side_effect: as for jax.ffi.ffi_call. Without a side effect XLA may drop or merge calls. This must then happen
        on all devices alike.
      options: further arguments of jax.ffi.ffi_call.

    Returns:
      A function of arrays and attributes, like that of jax.ffi.ffi_call. The handlers receive the attributes as a
      dictionary (`.Attrs()`), with `jaxcomm` and `jaxcomm_groups` added. Under check_vma=True, its results count as
      equal on all devices unless `result_shape_dtypes` says otherwise.

    Raises:
      NameError: axis_name is not bound by an enclosing shard_map.
      ValueError: the groups don't fit, or a mesh axis is not manual (when tracing).
      NotImplementedError: an axis is one of vmap.
    """
    axes = _check.axes(target_name, axis_name)
    groups = _check.groups(target_name, axis_index_groups, axes)
    sms = _check.max_sms(target_name, max_sms)
    mesh = jax.sharding.get_abstract_mesh()
    if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
        raise NotImplementedError(f"{target_name}: {unknown[0]!r} is an axis of vmap, expected one of a mesh")
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
    call = jax.ffi.ffi_call(target_name, result_shape_dtypes, has_side_effect=has_side_effect, **options)

    def wrapped(*xs: Any, **more: Any) -> Any:
        # As jax.numpy does: a custom call by itself wants operands that vary over the same axes.
        xs = tuple(jax.numpy.asarray(x) for x in xs)
        varying = tuple(frozenset().union(*(_compat.varying_axes(x) for x in xs)))
        xs = tuple(_compat.make_varying(x, varying) for x in xs)
        return call(*xs, jaxcomm=attributes, jaxcomm_groups=rows.reshape(-1).astype(np.int64), **more)

    return wrapped
