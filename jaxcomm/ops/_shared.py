"""Arguments that all collectives share, and the decorator that completes signatures and docstrings with them."""

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from jaxcomm import _check
from jaxcomm._lowering import Call
from jaxcomm._typing import AxisIndexGroups, AxisName, PyTree

F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Keywords of every collective."""

    algorithm: str | None
    max_sms: int | None


class StartOptions(Options, total=False):
    """Keywords of every start function."""

    after: PyTree


_ARGUMENTS = {
    "axis_name": """mesh axis, or tuple of axes, outermost first; n is the number of ranks in a group. Several axes
    declare a hierarchy: the innermost axis stays inside a node.""",
    "axis_index_groups": "groups as lists of ranks, all of one size; None means one group of all ranks.",
    "algorithm": """a name from ``algorithms("{op}")``, or "xla" for XLA's own collective. "xla_hierarchical" composes
    it of XLA's collectives inside nodes and between them (not ppermute, barrier and ragged_all_to_all). None lets the
    selection table choose.""",
    "max_sms": """on GPUs, the most multiprocessors that the call occupies, with one thread block each. The value must
    be equal on all ranks. None means JAXCOMM_MAX_SMS, which is an upper limit in any case. On the smallest GPU of the
    group, up to 40 multiprocessors stay free for other kernels. No effect on CPUs.""",
    "after": "pytree of arrays that have been computed before the transfer starts.",
}
_ERRORS = {
    "NameError": "axis_name is not bound by an enclosing shard_map or vmap.",
    "TypeError": "a tracer in place of a static value, or an unsupported element type (when tracing).",
    "jax.errors.JaxRuntimeError": """a rank died or did not arrive within JAXCOMM_TIMEOUT_S, or calls of ranks differ
    (at run time).""",
}
_START = """Computations can run beside the transfer until ``done()`` of the result. See docs/guide/overlap.md."""


def _sections(doc: str) -> dict[str, str]:
    """The text before the first section, under the name "", and the sections of a docstring."""
    parts = re.split(r"^(Args|Returns|Raises|Cost|Source):", doc, flags=re.M)
    return {"": parts[0].strip()} | {name: text.rstrip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _entries(section: str) -> dict[str, str]:
    return dict(re.findall(r"^  ([\w.]+): (.*(?:\n {4}.*)*)", section, re.M))


def _text(entries: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {text}" for name, text in entries.items())


def collective(like: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Completes the signature and the docstring of a public collective.

    In the signature, the keywords of the TypedDict replace `**options`. The docstring gets the arguments and errors
    that all collectives share; texts of its own take precedence.

    Args:
      like: a collective whose arguments, errors and cost are also those of this one.
    """

    def complete(function: F) -> F:
        (options,) = typing.get_args(function.__annotations__["options"])
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        for name, kind in typing.get_type_hints(options).items():
            default = () if name == "after" else None
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        function.__dict__["__signature__"] = signature.replace(parameters=parameters)
        own, base = (_sections(inspect.getdoc(f) or "") if f else {} for f in (function, like))
        known = _ARGUMENTS | _entries(base.get("Args", "")) | _entries(own.get("Args", ""))
        arguments = {p.name: known[p.name].replace("{op}", function.__name__) for p in parameters}
        errors = _entries(base.get("Raises", "")) | _entries(own.get("Raises", ""))
        found = base | own
        found["Args"] = _text(arguments)
        found["Raises"] = _text(_ERRORS | errors)
        if "after" in arguments and like:
            found[""] += "\n\n" + _START
            found["Returns"] = f"\n  A Pending. ``done()`` returns the same bits as {like.__name__}."
        names = [name for name in ("Args", "Returns", "Raises", "Cost", "Source") if name in found]
        function.__doc__ = "\n\n".join([found[""], *(f"{name}:{found[name]}" for name in names)])
        return function

    return complete


def make_call(
    op: str,
    native: str,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups | None,
    options: Options,
    *,
    unequal: bool = False,
) -> Call:
    """Checks the arguments that all collectives share and returns them as a Call.

    Args:
      op: public name, for messages. A name that ends in _start makes an asynchronous call.
      native: native name; its algorithms are valid.
      axis_name: argument of the op, not yet checked.
      axis_index_groups: argument of the op, not yet checked.
      options: keywords of the op, not yet checked.
      unequal: whether groups of different sizes are allowed.
    """
    asynchronous = op.endswith("_start")
    for name in options.keys() - (StartOptions if asynchronous else Options).__annotations__.keys():
        raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
    axes = _check.axes(op, axis_name)
    groups = _check.groups(op, axis_index_groups, axes, unequal=unequal)
    algorithm = _check.algorithm(op, native, options.get("algorithm"))
    max_sms = _check.max_sms(op, options.get("max_sms"))
    return Call(op, axes, groups, algorithm, max_sms, _check.call_site(), asynchronous)
