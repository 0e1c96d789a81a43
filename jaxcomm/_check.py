"""Checks of arguments at trace time. Messages name the op, the argument, the value and the expected values."""

import numbers
import operator
import os
import sys
import types
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax

from jaxcomm import _compat, _xla_hierarchical
from jaxcomm._core import plan
from jaxcomm._typing import AxisIndexGroups, AxisName, AxisNames, Groups

_PACKAGES = tuple(os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (jax, sys.modules["jaxcomm"]))
_MOST = 2**63 - 1


def call_site() -> str:
    """`file.py:12 (function)` of the innermost caller outside jax and jaxcomm, for error messages."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame is None:
        return "unknown place"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"


def site_of(source_info: Any) -> str:
    """As call_site, for an equation of a jaxpr."""
    for file, line, function in _compat.frames_of(source_info):
        if not file.startswith((*_PACKAGES, "<")):
            return f"{os.path.basename(file)}:{line} ({function})"
    return "unknown place"


def static(op: str, name: str, value: Any) -> Any:
    if _compat.is_tracer(value):
        raise TypeError(
            f"{op}: {name} must be known when tracing, got {value}. Pass a Python value, or list it in static_argnames "
            "of jax.jit."
        )
    return value


def integer(op: str, name: str, value: Any) -> int:
    static(op, name, value)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}") from None


def positive(op: str, name: str, value: Any) -> int:
    number = integer(op, name, value)
    if number < 1:
        raise ValueError(f"{op}: {name} must be positive, got {number}")
    return number


def number(op: str, name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not least <= float(value) <= most:
        raise ValueError(f"{op}: {name} must be a number between {least:g} and {most:g}, got {value!r}")
    return float(value)


def whole(op: str, name: str, value: Any, least: int, most: int = _MOST) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        index = least - 1
    if isinstance(value, bool) or not least <= index <= most:
        bounds = f"of at least {least}" if most == _MOST else f"from {least} to {most}"
        raise ValueError(f"{op}: {name} must be an integer {bounds}, got {value!r}")
    return index


def rank(op: str, name: str, value: Any, n: int) -> int:
    index = integer(op, name, value)
    if not 0 <= index < n:
        raise ValueError(f"{op}: {name} must be a rank from 0 to {n - 1}, got {index}")
    return index


def permutation(op: str, perm: Any, n: int) -> tuple[tuple[int, int], ...]:
    """Checks (source, destination) pairs of n ranks and returns them as tuples."""
    static(op, "perm", perm)
    try:
        rows = [tuple(pair) for pair in perm]
    except TypeError as error:
        raise TypeError(f"{op}: perm must be a list of (source, destination) pairs, got {perm!r}") from error
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"{op}: perm must be a list of (source, destination) pairs, got {rows}")
    pairs = tuple((integer(op, "perm", s), integer(op, "perm", d)) for s, d in rows)
    for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{op}: perm must have each {what} at most once, got {what}s {ranks}")
        if any(not 0 <= r < n for r in ranks):
            raise ValueError(f"{op}: perm must have {what}s from 0 to {n - 1}, got {ranks}")
    return pairs


def dimension(op: str, name: str, value: Any, ndim: int) -> int:
    """Checks an array dimension and returns it as a number in [0, ndim)."""
    index = integer(op, name, value)
    if not -ndim <= index < ndim:
        raise ValueError(f"{op}: {name}={index} is out of range for an array of {ndim} dimensions")
    return index % ndim


def axes(op: str, axis_name: AxisName, *, dimensions: bool = False) -> AxisNames:
    """Checks axis names and returns them as a tuple. An enclosing shard_map or vmap must bind each name.

    If `dimensions` is true, integers are allowed.
    """
    static(op, "axis_name", axis_name)
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    for name in names:
        if isinstance(name, int):
            if not dimensions:
                raise TypeError(f"{op}: axis_name must name mesh axes, got the integer {name}")
        elif not isinstance(name, Hashable):
            raise TypeError(f"{op}: axis_name must be a mesh axis or a tuple of them, got {axis_name!r}")
        elif _compat.unbound_axis(name):
            mesh_axes = jax.sharding.get_abstract_mesh().manual_axes
            inside = (
                f"the axes of the enclosing shard_map are {tuple(mesh_axes)}"
                if mesh_axes
                else "there is no enclosing jax.shard_map; call it under jax.shard_map"
            )
            raise NameError(f"{op}: axis_name {name!r} is not bound here: {inside}")
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: axis_name must have each axis at most once, got {names}")
    return names


def groups(op: str, axis_index_groups: AxisIndexGroups | None, names: AxisNames, *, unequal: bool = False) -> Groups:
    """Checks axis_index_groups and returns them as tuples.

    The groups must partition the axis. Their sizes must be equal unless `unequal` is true.
    """
    if axis_index_groups is None:
        return None
    static(op, "axis_index_groups", axis_index_groups)
    try:
        lists = [list(group) for group in axis_index_groups]
    except TypeError as error:
        raise TypeError(f"{op}: axis_index_groups must be lists of ranks, got {axis_index_groups!r}") from error
    rows = tuple(tuple(integer(op, "axis_index_groups", i) for i in group) for group in lists)
    size = lax.axis_size(names)
    if sorted(i for row in rows for i in row) != list(range(size)):
        raise ValueError(
            f"{op}: axis_index_groups must have each index of {_show(names)} (0 to {size - 1}) exactly once, got {rows}"
        )
    if len({len(row) for row in rows}) != 1 and not unequal:
        raise ValueError(f"{op}: axis_index_groups must have equal sizes, got sizes {[len(row) for row in rows]}")
    return rows


def equal_sizes(rows: Groups) -> bool:
    return rows is None or len({len(row) for row in rows}) == 1


def group_size(names: AxisNames, rows: Groups) -> int:
    return lax.axis_size(names) if rows is None else len(rows[0])


def _algorithms(collective: str) -> list[str]:
    composed = [_xla_hierarchical.NAME] if collective in _xla_hierarchical.COMPOSITIONS else []
    return [*(row[0] for row in plan.algorithms(collective)), "xla", *composed]


def algorithm(op: str, collective: str, name: str | None) -> str | None:
    if name is not None and name not in (known := _algorithms(collective)):
        raise ValueError(f"{op}: unknown algorithm {name!r}; pass one of {', '.join(known)}")
    return name


def has_algorithm(collective: str, name: str | None) -> bool:
    """Whether a collective (its native name) takes this argument `algorithm`."""
    return name is None or name in _algorithms(collective)


def max_sms(op: str, value: Any) -> int | None:
    if value is None:
        return None
    number = integer(op, "max_sms", value)
    if isinstance(value, bool) or not 0 < number < 2**31:
        raise ValueError(f"{op}: max_sms must be a positive integer, got {value!r}")
    return number


def divisible(op: str, name: str, index: int, shape: Sequence[int], parts: int, names: AxisNames) -> None:
    if shape[index] % parts:
        raise ValueError(
            f"{op}: dimension {name}={index} of an array of shape {tuple(shape)} has size {shape[index]}, which "
            f"cannot be split into {parts} equal blocks, one per rank of {_show(names)}"
        )


def equal(op: str, name: str, index: int, shape: Sequence[int], parts: int, names: AxisNames) -> None:
    if shape[index] != parts:
        raise ValueError(
            f"{op}: dimension {name}={index} of an array of shape {tuple(shape)} must have size {parts}, one per rank "
            f"of {_show(names)}, unless tiled=True; got {shape[index]}"
        )


def unsharded(op: str, name: str, index: int, aval: Any) -> None:
    """Raises if the dimension to split or join is sharded over an explicit mesh axis."""
    spec = aval.sharding.spec
    if index < len(spec) and spec[index] is not None:
        raise ValueError(
            f"{op}: dimension {name}={index} is sharded over the explicit mesh axis {spec[index]!r}; reshard it first "
            "(jax.sharding.reshard)"
        )


def element_type(op: str, x: Any, *, ordered: bool = False, booleans: bool = True, name: str = "x") -> None:
    """Raises for extended element types (PRNG keys), for complex ones if the op needs an order, and for booleans."""
    dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{op}: {name} has element type {dtype}; pass its data (jax.random.key_data)")
    if ordered and jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
        raise TypeError(f"{op}: x has element type {dtype}, which has no order; expected a real type")
    if not booleans and dtype == jax.numpy.bool_:
        raise TypeError(f"{op}: {name} has element type bool, which can't be summed; convert it to an integer type")


def _show(names: AxisNames) -> str:
    return repr(names[0]) if len(names) == 1 else repr(names)
