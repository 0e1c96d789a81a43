"""The work of one device in a step, read from a jaxpr: kernels, collectives and loops with their dependencies."""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxcomm import _check
from jaxcomm._core import plan
from jaxcomm._request import NATIVE
from jaxcomm.simulate.step import roofline
from jaxcomm.simulate.step.tasks import Block, Exchange, Kernel, Loop, StepError, Task


class _Value:
    """A value of the inlined program."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


@dataclasses.dataclass
class _Equation:
    name: str
    params: Mapping[str, Any]
    ins: list[_Value]
    outs: list[_Value]
    keeps: bool  # has an effect
    source: Any
    sharded: bool  # inside of shard_map

    @property
    def site(self) -> str:
        return _check.site_of(self.source)


# Primitives whose only work is that of a jaxpr in their parameters.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
          "custom_vjp_call_jaxpr", "custom_lin", "shard_map", "run_state", "composite")  # fmt: skip
# Name of the primitive of jax.lax -> public name.
_LAX = {
    "psum": "psum", "psum2": "psum", "psum_invariant": "psum", "pmax": "pmax", "pmin": "pmin",
    "all_gather": "all_gather", "all_gather_invariant": "all_gather", "reduce_scatter": "psum_scatter",
    "all_to_all": "all_to_all", "ragged_all_to_all": "ragged_all_to_all", "ppermute": "ppermute",
    "pbroadcast": "pbroadcast",
}  # fmt: skip
# Name of jaxcomm's primitive -> public name, for calls that other operations make.
_OWN = {native: op for op, native in reversed(NATIVE.items())} | {
    "all_gather_invariant": "all_gather", "all_reduce_ordered": "psum",
    "moe_dispatch": "ragged_all_to_all", "moe_combine": "ragged_all_to_all",
    "all_gather_matmul": "all_gather", "matmul_psum_scatter": "psum_scatter",
}  # fmt: skip
_BY_XLA = "collectives that XLA executes, the default on GPUs, take the time of jaxcomm's plan, asynchronously"
_EVEN_EXPERTS = "experts get equally many tokens, and every choice of a token is sent"
# Primitives over named axes that send nothing.
_LOCAL = ("axis_index", "pvary", "pcast", "core_pmap")


def _open(jaxpr: Any) -> Any:
    """A Jaxpr, also of a ClosedJaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _arguments(params: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """Fields of an Exchange that the parameters of a primitive give."""
    rows = {"groups": groups, "perm": params.get("perm")}
    made = {key: None if value is None else tuple(tuple(map(int, row)) for row in value) for key, value in rows.items()}
    return made | {"source": int(params.get("source", 0))}


class Reader:
    """Reads the program of one device.

    Attributes:
      meshes: names and sizes of the axes of each shard_map, and its site.
      notes: assumptions that the program made necessary.
    """

    def __init__(self, while_trips: int):
        self.while_trips = while_trips
        self.meshes: list[tuple[dict[str, int], str]] = []
        self.notes: dict[str, int] = {}
        self._depth = 0  # of shard_map

    def note(self, text: str, count: int = 1) -> None:
        self.notes[text] = self.notes.get(text, 0) + count

    def block(self, jaxpr: Any, sharded: bool = False) -> Block:
        """The tasks of a jaxpr. `sharded`: it is inside of shard_map."""
        self._depth = int(sharded)
        jaxpr = _open(jaxpr)
        flat: list[_Equation] = []
        values = {v: _Value(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
        outs = self._inline(jaxpr, values, flat)
        live = {id(v) for v in outs}
        kept: list[_Equation] = []
        for equation in reversed(flat):
            if equation.keeps or any(id(v) in live for v in equation.outs):
                kept.append(equation)
                live.update(id(v) for v in equation.ins)
        return _Builder(self, kept[::-1], outs).build()

    def _inline(self, jaxpr: Any, values: dict[Any, _Value], flat: list[_Equation]) -> list[_Value]:
        def value(atom: Any) -> _Value:
            return _Value(atom.aval) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, [value(v) for v in eqn.invars]
            keys = [key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params and name in _CALLS]
            if keys:
                inner = _open(eqn.params[keys[0]])
                if name == "shard_map":
                    self._enter(eqn)
                ins = ins[len(ins) - len(inner.invars) :]
                if name == "shard_map":  # values of one device
                    ins = self._alias(eqn, ins, [v.aval for v in inner.invars], flat)
                inside = dict(zip(inner.invars, ins, strict=True))
                inside |= {v: _Value(v.aval) for v in inner.constvars}
                results = self._inline(inner, inside, flat)
                if name == "shard_map":
                    results = self._alias(eqn, results, [v.aval for v in eqn.outvars], flat)
                    self._depth -= 1
            else:
                results = [_Value(v.aval) for v in eqn.outvars]
                if self._depth == 0 and name not in roofline.FREE:
                    self.note(
                        "computation outside of shard_map counts in full on every device; its sharding is not known"
                    )
                source = eqn.source_info
                flat.append(_Equation(name, eqn.params, ins, results, bool(eqn.effects), source, self._depth > 0))
            values.update(zip(eqn.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _alias(self, eqn: Any, values: list[_Value], avals: list[Any], flat: list[_Equation]) -> list[_Value]:
        """The values with other types."""
        results = [_Value(aval) for aval in avals]
        for value, result in zip(values, results, strict=True):
            flat.append(_Equation("reshape", {}, [value], [result], False, eqn.source_info, True))
        return results

    def _enter(self, eqn: Any) -> None:
        self._depth += 1
        mesh = eqn.params["mesh"]
        self.meshes.append((dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), _check.site_of(eqn.source_info)))
        manual = eqn.params.get("manual_axes", eqn.params.get("newly_manual_axes"))
        if manual is not None and set(manual) != set(mesh.axis_names) and self._depth == 1:
            rest = ", ".join(a for a in mesh.axis_names if a not in manual)
            self.note(f"collectives that XLA inserts over the automatic axes ({rest}) are missing")


class _Builder:
    """Groups equations into tasks.

    An equation of _anchor is a task of its own. Others that exchange values are one kernel, if as many anchors lie on
    the longest path to them: no anchor can then lie between them.
    """

    def __init__(self, reader: Reader, flat: list[_Equation], outs: list[_Value]):
        self.reader = reader
        by_value: dict[int, list[_Equation]] = {}
        for equation in flat:
            for value in equation.ins:
                by_value.setdefault(id(value), []).append(equation)
        self.source: dict[int, _Value] = {}  # of values that share the memory of another one
        self.flat: list[_Equation] = []
        for equation in flat:
            if not self._free(equation, by_value):
                self.flat.append(equation)
            elif equation.ins:
                last = len(equation.ins) - 1
                pairs = zip(equation.outs, (equation.ins[min(i, last)] for i in range(len(equation.outs))), strict=True)
                self.source.update({id(out): self.of(value) for out, value in pairs})
        self.outs = {id(self.of(value)) for value in outs}
        self.users: dict[int, list[int]] = {}
        self.maker: dict[int, int] = {}
        for index, equation in enumerate(self.flat):
            for value in equation.ins:
                self.users.setdefault(id(self.of(value)), []).append(index)
            self.maker.update({id(value): index for value in equation.outs})

    def of(self, value: _Value) -> _Value:
        """The value in memory."""
        return self.source.get(id(value), value)

    def _before(self, index: int) -> Iterator[int]:
        """Equations whose results an equation uses."""
        for value in self.flat[index].ins:
            if (made := self.maker.get(id(self.of(value)))) is not None:
                yield made

    def build(self) -> Block:
        works: list[tuple[list[int], list[Kernel | Exchange | Loop]]] = []  # equations, and what they do together
        for members, work in self._parts():
            works.append((members, self._fused(members) if work is None else work))
        part_of = {index: number for number, (members, _) in enumerate(works) for index in members}
        needs = [
            {part_of[other] for i in members for other in self._before(i)} - {number}
            for number, (members, _) in enumerate(works)
        ]
        users: list[list[int]] = [[] for _ in works]
        for number, before in enumerate(needs):
            for other in before:
                users[other].append(number)
        waits = [len(before) for before in needs]
        ready = [(works[i][0][0], i) for i in range(len(works)) if not waits[i]]
        heapq.heapify(ready)  # in the order of the program
        tasks: list[Task] = []
        made: dict[int, frozenset[int]] = {}  # tasks that the values of a part need
        while ready:
            _, number = heapq.heappop(ready)
            earlier = frozenset(task for other in needs[number] for task in made[other])
            own = works[number][1]
            made[number] = frozenset(range(len(tasks), len(tasks) + len(own))) or earlier
            tasks += [Task(work, tuple(sorted(earlier))) for work in own]
            for user in users[number]:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (works[user][0][0], user))
        return Block(tuple(tasks))

    def _parts(self) -> Iterator[tuple[list[int], list[Kernel | Exchange | Loop] | None]]:
        """Equations by part, with the work of an anchor."""
        depth: list[int] = []
        parent = list(range(len(self.flat)))
        anchors: dict[int, list[Kernel | Exchange | Loop]] = {}

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for index, equation in enumerate(self.flat):
            before = list(self._before(index))
            depth.append(max((depth[i] + (i in anchors) for i in before), default=0))
            if (work := self._anchor(equation)) is not None:
                anchors[index] = work
                continue
            for i in before:
                if i not in anchors and depth[i] == depth[index]:
                    parent[root(i)] = root(index)
        parts: dict[int, list[int]] = {}
        for index in range(len(self.flat)):
            parts.setdefault(root(index), []).append(index)
        for members in parts.values():
            yield members, anchors.get(members[0])

    def _fused(self, members: list[int]) -> list[Kernel | Exchange | Loop]:
        """One kernel. Its inputs are read once, its results written once."""
        equations, own = [self.flat[i] for i in members], set(members)
        if all(v.aval.size <= 1 for equation in equations for v in (*equation.ins, *equation.outs)):
            return []  # scalars
        inside = {id(v) for equation in equations for v in equation.outs}
        read: dict[int, float] = {}
        for equation in equations:
            for value, size in zip(equation.ins, roofline.bytes_read(equation), strict=True):
                source = self.of(value)
                if id(source) not in inside:
                    read[id(source)] = min(read.get(id(source), 0.0) + size, roofline.bytes_of(source.aval))
        written = sum(
            roofline.bytes_of(value.aval)
            for equation in equations
            for value in equation.outs
            if id(value) in self.outs or any(user not in own for user in self.users.get(id(value), []))
        )
        name = equations[0].name if len(equations) == 1 else "fusion"
        return [Kernel(name, 0.0, sum(read.values()) + written, "", equations[0].site)]

    @staticmethod
    def _free(equation: _Equation, users: Mapping[int, list[_Equation]]) -> bool:
        if equation.name == "transpose":  # layouts of operands of products are free
            own = users.get(id(equation.outs[0]), [])
            return bool(own) and all(u.name == "dot_general" for u in own)
        return equation.name in roofline.FREE

    def _anchor(self, equation: _Equation) -> list[Kernel | Exchange | Loop] | None:
        """The work of an equation that is not fused with others; None for others."""
        name, params = equation.name, equation.params
        if name in _LOCAL:
            return None
        if name in _LAX:
            return self._lax(equation)
        if name.startswith("jaxcomm_"):
            return self._jaxcomm(equation)
        if name in ("scan", "while", "cond", "switch"):
            return self._loop(equation)
        if name == "pallas_call":
            return [self._pallas(equation)]
        over = params.get("axis_name", params.get("axes", ()))
        if any(isinstance(axis, str) for axis in (over if isinstance(over, tuple) else (over,))):
            raise StepError(f"step: {name} at {equation.site} over {over} is not modelled")
        if (cost := roofline.product(equation)) is None:
            return None
        flops, size, dtype = cost
        return [Kernel(name, flops, size, dtype, equation.site)]

    def _loop(self, equation: _Equation) -> list[Kernel | Exchange | Loop]:
        name, params, site = equation.name, equation.params, equation.site
        if name == "scan":
            return [Loop(name, (self.reader.block(params["jaxpr"], equation.sharded),), int(params["length"]), site)]
        if name == "while":
            self.reader.note(
                f"the length of a while loop is not known before it runs: {self.reader.while_trips} iteration(s); "
                "set while_trips"
            )
            condition = self.reader.block(params["cond_jaxpr"], equation.sharded)
            body = condition.then(self.reader.block(params["body_jaxpr"], equation.sharded))
            last: list[Kernel | Exchange | Loop] = [Loop(name, (condition,), 1, site)] if condition.tasks else []
            return [Loop(name, (body,), self.reader.while_trips, site), *last]
        blocks = tuple(self.reader.block(branch, equation.sharded) for branch in params["branches"])
        self.reader.note("of the branches of a cond, the slowest counts")
        return [Loop(name, blocks, 1, site)]

    def _pallas(self, equation: _Equation) -> Kernel:
        """The work that the caller declares, or that of the products in the body."""
        params, what = equation.params, f"pallas_call at {equation.site}"
        estimate = params.get("cost_estimate")
        if getattr(estimate, "remote_bytes_transferred", 0) or roofline.exchanges(params["jaxpr"]):
            raise StepError(f"step: {what} exchanges data with other devices, which is not modelled")
        dtype = roofline.product_type(params["jaxpr"])
        if estimate is not None:
            self.reader.note("a pallas_call has the work of its cost_estimate")
            return Kernel("pallas_call", float(estimate.flops), float(estimate.bytes_accessed), dtype, equation.site)
        grid = params["grid_mapping"].grid
        if not all(isinstance(size, int) for size in grid):
            raise StepError(f"step: {what} has the grid {grid}, which is not known; give it a cost_estimate")
        self.reader.note(
            "a pallas_call without cost_estimate has the work of its products, and reads and writes its arrays once"
        )
        flops = math.prod(grid) * roofline.products_in(params["jaxpr"], self.reader.while_trips)
        size = sum(roofline.bytes_of(v.aval) for v in (*equation.ins, *equation.outs))
        return Kernel("pallas_call", flops, size, dtype, equation.site)

    def _lax(self, equation: _Equation) -> list[Kernel | Exchange | Loop]:
        """XLA executes collectives of jax.lax as pairs of start and done."""
        name, params = equation.name, equation.params
        over = params.get("axes", params.get("axis_name"))
        axes = tuple(a for a in (over if isinstance(over, tuple) else (over,)) if isinstance(a, str))
        ins = equation.ins[:1] if name == "ragged_all_to_all" else equation.ins
        by_type: dict[str, int] = {}
        for value in ins:
            dtype = str(value.aval.dtype)
            by_type[dtype] = by_type.get(dtype, 0) + math.prod(value.aval.shape)
        self.reader.note(_BY_XLA)
        given = _arguments(params, params.get("axis_index_groups"))
        return [
            Exchange(_LAX[name], axes, count, dtype, equation.site, asynchronous=True, **given)
            for dtype, count in by_type.items()
            if axes
        ]

    def _jaxcomm(self, equation: _Equation) -> list[Kernel | Exchange | Loop]:
        """A synchronous call with an algorithm of jaxcomm blocks the stream. XLA executes those without one."""
        name, params = equation.name.removeprefix("jaxcomm_"), equation.params
        if name == "moe_check":
            return []
        if name in ("moe_count", "moe_place"):
            size = sum(roofline.bytes_of(v.aval) for v in (*equation.ins, *equation.outs))
            return [Kernel(name, 0.0, size, "int32", params["call"].site)]
        if name == "moe_one_shot":
            call = params["call"]
            self.reader.note(_EVEN_EXPERTS)
            return [
                Exchange(op, tuple(call.axes), size, "uint8", call.site, asynchronous=False, max_sms=call.max_sms)
                for op, size in roofline.route_and_dispatch(equation)
            ]
        call = params["call"] if "call" in params else getattr(params.get("spec"), "call", None)
        if call is None or name not in _OWN:
            raise StepError(f"step: jaxcomm_{name} at {equation.site} is not modelled")
        x = equation.ins[0].aval
        op = call.op if NATIVE.get(call.op) == NATIVE[_OWN[name]] else _OWN[name]
        count, flops, dtype = math.prod(x.shape), 0.0, str(x.dtype)
        algorithm, max_sms = getattr(call, "algorithm", None), getattr(call, "max_sms", None)
        asynchronous = getattr(call, "asynchronous", False)
        if algorithm in (None, "xla", "xla_hierarchical"):
            self.reader.note(_BY_XLA)
            asynchronous, algorithm, max_sms = True, None, None
        elif asynchronous:
            max_sms = min(max_sms or plan.ASYNCHRONOUS_CHANNELS, plan.ASYNCHRONOUS_CHANNELS)
        if name in ("moe_dispatch", "moe_combine"):
            self.reader.note(_EVEN_EXPERTS)
            algorithm, slots = None, equation.ins[-3].aval
            rows = equation.ins[:-3] if name == "moe_dispatch" else equation.ins[:1]
            # Leaves may have different types.
            count = sum(slots.size * math.prod(v.aval.shape[1:]) * v.aval.dtype.itemsize for v in rows)
            dtype = "uint8"
        elif name in ("all_gather_matmul", "matmul_psum_scatter"):
            flops = roofline.collective_matmul(name, equation)
            asynchronous, algorithm = algorithm != "unfused", None
            if name == "matmul_psum_scatter":
                count = math.prod(x.shape[:-1]) * equation.ins[len(equation.ins) // 2].aval.shape[-1]
            self.reader.note("collective products overlap with their transfers, unless the algorithm is unfused")
        given = {"algorithm": algorithm, "max_sms": max_sms, **_arguments(params, call.groups)}
        made = Exchange(op, tuple(call.axes), count, dtype, call.site, asynchronous, **given)
        size = sum(roofline.bytes_of(v.aval) for v in (*equation.ins, *equation.outs))
        return [made, *([Kernel(name, flops, size, str(np.dtype(x.dtype)), call.site)] if flops else [])]
