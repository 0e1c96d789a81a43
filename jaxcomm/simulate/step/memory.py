"""Memory of one device during a step: the values of its jaxpr that are alive at the same time."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from jaxcomm.simulate.step import roofline


def peak_bytes(jaxpr: Any) -> float:
    """The most bytes that a device holds at once inside of a shard_map, in the order of the program.

    An estimate. Operands are freed after their last use, as if they were donated. Results of elementwise operations
    count, although XLA fuses many of them, and XLA may choose another order.
    """
    found = 0.0
    for eqn in _open(jaxpr).eqns:
        inside = _peak if eqn.primitive.name == "shard_map" else peak_bytes
        found = max([found, *map(inside, roofline.parts(eqn))])
    return found


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _variables(atoms: Any) -> Iterator[Any]:
    return (atom for atom in dict.fromkeys(a for a in atoms if not isinstance(a, Literal)))


def _peak(jaxpr: Any) -> float:
    jaxpr = _open(jaxpr)
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in _variables(eqn.invars)}
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    held = {v: roofline.bytes_of(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
    alive = most = sum(held.values())
    for i, eqn in enumerate(jaxpr.eqns):
        free = eqn.primitive.name in roofline.FREE
        own = {v: 0.0 if free else roofline.bytes_of(v.aval) for v in eqn.outvars}
        # What an inner program holds in addition to its operands.
        inner = max(
            (_peak(part) - sum(roofline.bytes_of(v.aval) for v in _open(part).invars) for part in roofline.parts(eqn)),
            default=0.0,
        )
        made = sum(own.values())
        # The results of a scan exist during its iterations. Those of a call are among the values of the call.
        most = max(most, alive + (made + inner if eqn.primitive.name == "scan" else max(made, inner)))
        alive += made
        held |= own
        ends = [v for v in (*_variables(eqn.invars), *eqn.outvars) if last.get(v, -1) <= i]
        for v in ends:
            size = held.pop(v, 0.0)
            if free and v not in own and eqn.outvars[0] in held:  # the result shares the memory
                held[eqn.outvars[0]] += size
            else:
                alive -= size
    return most
