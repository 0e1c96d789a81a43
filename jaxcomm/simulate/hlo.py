"""The work of one device in HLO text after SPMD partitioning: kernels, collectives and loops."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxcomm._lowering import replica_groups
from jaxcomm.simulate import hlo_text, profile, steps
from jaxcomm.simulate.cluster import Cluster
from jaxcomm.simulate.hlo_text import Instruction, Module, Shape
from jaxcomm.simulate.program import Block, Exchange, Kernel, Loop, StepError, Task

# Opcode -> public name.
_OPS = {"all-reduce": "psum", "all-gather": "all_gather", "reduce-scatter": "psum_scatter", "all-to-all": "all_to_all",
        "collective-permute": "ppermute", "ragged-all-to-all": "ragged_all_to_all",
        "collective-broadcast": "pbroadcast"}  # fmt: skip
_REDUCTIONS = {"maximum": "pmax", "minimum": "pmin"}
# No work of their own.
_FREE = {"parameter", "constant", "tuple", "bitcast", "after-all", "add-dependency", "partition-id", "replica-id",
         "iota", "opt-barrier", "optimization-barrier", "domain", "get-dimension-size", "rng-get-and-update-state",
         "reshape", "bitcast-convert", "async-done", "async-update", "copy-done"}  # fmt: skip
_UNKNOWN = {"send", "recv", "send-done", "recv-done", "infeed", "outfeed"}
_SLICES = ("slice", "dynamic-slice", "gather")

Needs = Any  # a set of tasks, or of a tuple a list of Needs


def _all(needs: Needs) -> frozenset[int]:
    if isinstance(needs, list):
        return frozenset().union(*map(_all, needs))
    return needs  # type: ignore[no-any-return]


def _dims(instruction: Instruction, name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", instruction.attributes.get(name, ""))]


def _called(instruction: Instruction, *names: str) -> list[str]:
    """Names of the computations in these attributes."""
    found = []
    for name in names:
        if name in instruction.attributes:
            found += re.findall(r"[\w.\-]+", instruction.attributes[name])
    return found


class _Reader:
    """The tasks of a module on a mesh whose devices are numbered row by row."""

    def __init__(self, module: Module, mesh: dict[str, int], while_trips: int, times: dict[str, float] | None = None):
        self.module, self.mesh, self.while_trips, self.times = module, mesh, while_trips, times
        self.timed = 0  # kernels with a measured time
        self.shapes = {
            name: {i.name: i.shapes for i in instructions} for name, instructions in module.computations.items()
        }
        self.pairs = any(
            i.opcode.endswith("-start") for instructions in module.computations.values() for i in instructions
        )
        self.notes: dict[str, int] = {}
        self.places: dict[bytes, tuple[tuple[str, ...], Any]] = {}

    def note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def block(self, name: str) -> Block:
        tasks: list[Task] = []
        self._run(name, [], tasks)
        return Block(tuple(tasks))

    def _run(self, name: str, arguments: list[Needs], tasks: list[Task]) -> Needs:
        """Adds the tasks of a computation, and returns those that its result needs."""
        if name not in self.module.computations:
            raise StepError(f"{self.module.file}: the computation {name} is missing")
        needs: dict[str, Needs] = {}
        result: Needs = frozenset()
        for instruction in self.module.computations[name]:
            if instruction.opcode == "parameter":
                number = int(instruction.attributes["number"])
                found = arguments[number] if number < len(arguments) else frozenset()
            else:
                found = self._instruction(name, instruction, needs, tasks)
            needs[instruction.name] = found
            if instruction.root:
                result = found
        return result

    def _instruction(self, name: str, i: Instruction, needs: dict[str, Needs], tasks: list[Task]) -> Needs:
        before = [needs[operand] for operand in i.operands]
        earlier = frozenset().union(*map(_all, before)) if before else frozenset()
        base, start = i.opcode.removesuffix("-start"), i.opcode.endswith("-start")

        def add(*works: Kernel | Exchange | Loop) -> frozenset[int]:
            """Several works run one after another's start: all need the same."""
            first = len(tasks)
            tasks.extend(Task(work, tuple(sorted(earlier))) for work in works)
            return frozenset(range(first, len(tasks))) or earlier

        if i.opcode == "tuple":
            return before
        if i.opcode == "get-tuple-element":
            index = int(i.attributes.get("index", 0))
            inside = before[0] if before else frozenset()
            return inside[index] if isinstance(inside, list) and index < len(inside) else _all(inside)
        if i.opcode in _UNKNOWN:
            raise StepError(f"{self.module.where(i)} is not modelled")
        if base in _OPS:
            return add(*self._collective(name, i, base, start))
        if i.opcode in _FREE or i.opcode.removesuffix("-done") in _OPS:
            return earlier
        if base == "async" and start:
            called = _called(i, "calls", "called_computation")[0]
            if (root := self.module.root(called)).opcode in _OPS:
                return add(*self._collective(called, root, root.opcode, True))
            return _all(self._run(called, before, tasks))
        if i.opcode == "call":
            return self._run(_called(i, "to_apply", "calls")[0], before, tasks)
        if i.opcode == "while":
            body = self.block(_called(i, "body")[0])
            return add(Loop("while", (body,), self._trips(i), self.module.site(i))) if body.tasks else earlier
        if i.opcode == "conditional":
            names = _called(i, "branch_computations", "true_computation", "false_computation")
            blocks = tuple(self.block(branch) for branch in names)
            self.note("of the branches of a conditional, the slowest counts")
            return add(Loop("cond", blocks, 1, self.module.site(i))) if any(b.tasks for b in blocks) else earlier
        kernel = self._kernel(name, i)
        if kernel and self.times is not None:
            kernel = self._timed(kernel, i.name)
        return add(kernel) if kernel else earlier

    def _trips(self, i: Instruction) -> int:
        known = i.config().get("known_trip_count")
        if isinstance(known, dict) and str(known.get("n", "")).isdigit():
            return int(known["n"])
        self.note(
            f"the text does not give the length of a while loop: {self.while_trips} iteration(s); set while_trips"
        )
        return self.while_trips

    # Collectives

    def _collective(self, name: str, i: Instruction, base: str, start: bool) -> list[Exchange]:
        op = _OPS[base]
        if base == "all-reduce" and (called := _called(i, "to_apply")):
            op = _REDUCTIONS.get(self.module.root(called[0]).opcode, op)
        operands = i.operands[:1] if base in ("ragged-all-to-all", "collective-permute") else i.operands
        shapes = [shape for operand in operands for shape in self.shapes[name][operand]]
        try:
            if base == "collective-permute":
                axes, perm = self._pairs(i.attributes.get("source_target_pairs", ""))
                groups = None
            else:
                axes, groups = self._groups(i, base)
                perm = None
        except ValueError as error:
            raise StepError(f"{self.module.where(i)}: {error}") from None
        if not start and not self.pairs:
            self.note("the text has no pairs of start and done; collectives run beside computation")
        counts: dict[str, int] = {}
        for shape in shapes:
            counts[shape.dtype] = counts.get(shape.dtype, 0) + shape.size
        self.note("collectives take the time of jaxcomm's plan")
        return [
            Exchange(
                op, axes, groups, count, dtype, None, None, perm, 0, start or not self.pairs, self.module.site(i)
            )
            for dtype, count in counts.items()
        ]  # fmt: skip

    def _groups(self, i: Instruction, base: str) -> tuple[tuple[str, ...], Any]:
        """Mesh axes that give the groups; else all axes and the groups."""
        devices = self.module.devices
        text = i.attributes.get("replica_groups", "")
        if base in ("all-reduce", "all-gather", "reduce-scatter") and "use_global_device_ids" not in i.attributes:
            if "channel_id" in i.attributes and self.module.replicas == 1:
                text = ""  # groups of replicas, each with all partitions
            elif 1 < self.module.replicas < devices:
                raise ValueError("groups of replicas in a program with partitions are not modelled")
        return self._place(hlo_text.groups(text, devices))

    def _place(self, rows: np.ndarray) -> tuple[tuple[str, ...], Any]:
        key = rows.tobytes() + str(rows.shape).encode()
        if key not in self.places:
            wanted = {tuple(sorted(row)) for row in rows.tolist()}
            self.places[key] = tuple(self.mesh), tuple(map(tuple, rows.tolist()))
            for axes in self._subsets():
                if math.prod(self.mesh[a] for a in axes) == rows.shape[1]:
                    found = replica_groups(tuple(self.mesh), tuple(self.mesh.values()), axes, None)
                    if {tuple(sorted(row)) for row in found.tolist()} == wanted:
                        self.places[key] = axes, None
                        break
        return self.places[key]

    def _subsets(self) -> Iterator[tuple[str, ...]]:
        for count in range(len(self.mesh) + 1):
            yield from itertools.combinations(self.mesh, count)

    def _pairs(self, text: str) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
        """The fewest axes along which all groups send alike, and what one group sends."""
        if not re.fullmatch(r"\{(\{\d+,\d+\},?)*\}", text.replace(" ", "")):
            raise ValueError(f"expected pairs of devices, got source_target_pairs={text[:80]}")
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        if max(numbers, default=0) >= self.module.devices:
            raise ValueError(f"expected devices below {self.module.devices}, got {max(numbers)}")
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        for axes in self._subsets():
            rows = replica_groups(tuple(self.mesh), tuple(self.mesh.values()), axes, None)
            place = {int(d): (g, at) for g, row in enumerate(rows) for at, d in enumerate(row)}
            if any(place[s][0] != place[d][0] for s, d in pairs):
                continue
            found: list[set[tuple[int, int]]] = [set() for _ in rows]
            for s, d in pairs:
                found[place[s][0]].add((place[s][1], place[d][1]))
            if all(own == found[0] for own in found):
                return axes, tuple(sorted(found[0]))
        return tuple(self.mesh), tuple(pairs)  # never: all axes form one group

    # Kernels

    def _timed(self, kernel: Kernel, name: str) -> Kernel:
        assert self.times is not None
        if name not in self.times:
            self.note("the profile has no time of a kernel; the roofline gives it")
            return kernel
        self.timed += 1
        return dataclasses.replace(kernel, time_s=self.times[name])

    def _kernel(self, name: str, i: Instruction) -> Kernel | None:
        operands = [self.shapes[name][operand] for operand in i.operands]
        arrays = [shape for shapes in (*operands, i.shapes) for shape in shapes]
        if all(shape.size <= 1 for shape in arrays):
            return None  # scalars
        site = self.module.site(i)
        if i.opcode == "custom-call":
            return self._custom(i, operands, site)
        if i.opcode == "fusion":
            called = _called(i, "calls")[0]
            flops, dtype = self._products(called)
            read, written = self._fused(called, operands, i.shapes)
            return Kernel(self.module.root(called).opcode, flops, read + written, dtype, site)
        flops, dtype = self._product(i, operands)
        read, written = _moved(i, operands)
        return Kernel(i.opcode, flops, read + written, dtype, site)

    def _custom(self, i: Instruction, operands: list[tuple[Shape, ...]], site: str) -> Kernel | None:
        target = i.attributes.get("custom_call_target", "").strip('"')
        if target.startswith("jaxcomm"):
            raise StepError(f"{self.module.where(i)}: {target} is read from the program, not from its HLO; use TARGET")
        if target in ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape") or target.startswith("xla.sdy"):
            raise StepError(f"{self.module.where(i)}: the text is not partitioned; expected compiled.as_text()")
        flops, dtype = 0.0, ""
        config = i.config()
        numbers = config.get("gemm_backend_config", config).get("dot_dimension_numbers")
        if isinstance(numbers, dict) and len(operands) > 1:
            left, right = operands[0][0], operands[1][0]
            names = ("rhs_contracting_dimensions", "rhs_batch_dimensions")
            own = {int(d) for key in names for d in numbers.get(key, [])}
            flops, dtype = _contraction(left, right, own), left.dtype
        else:
            self.note("custom calls have the bytes of their arrays, and no operations")
        return Kernel(target or "custom-call", flops, _sum((*operands, i.shapes)), dtype, site)

    def _product(self, i: Instruction, operands: list[tuple[Shape, ...]]) -> tuple[float, str]:
        if i.opcode == "dot":
            own = {*_dims(i, "rhs_contracting_dims"), *_dims(i, "rhs_batch_dims")}
            return _contraction(operands[0][0], operands[1][0], own), operands[0][0].dtype
        if i.opcode == "ragged-dot":
            return 2.0 * operands[0][0].size * i.shapes[0].dims[-1], operands[0][0].dtype
        if i.opcode == "convolution":
            kernel, labels = operands[1][0], re.search(r"_(\w+)->", i.attributes.get("dim_labels", ""))
            if labels is None or "o" not in labels[1]:
                raise StepError(f"{self.module.where(i)}: dim_labels are missing")
            flops = 2.0 * i.shapes[0].size * kernel.size / kernel.dims[labels[1].index("o")]
            return flops / int(i.attributes.get("batch_group_count", "1")), operands[0][0].dtype
        return 0.0, ""

    def _products(self, name: str) -> tuple[float, str]:
        """Operations of all products of a fusion, and the type of the first."""
        flops, dtype = 0.0, ""
        for i in self.module.computations.get(name, []):
            more, own = self._product(i, [self.shapes[name][operand] for operand in i.operands])
            for called in _called(i, "calls") if i.opcode in ("fusion", "call") else []:
                more, own = self._products(called)
            flops, dtype = flops + more, dtype or own
        return flops, dtype

    def _fused(self, name: str, operands: list[tuple[Shape, ...]], results: tuple[Shape, ...]) -> tuple[float, float]:
        """Bytes read and written. Of an operand of which the fusion reads slices only, these count."""
        instructions = self.module.computations.get(name, [])
        users: dict[str, list[Instruction]] = {}
        for i in instructions:
            for operand in i.operands:
                users.setdefault(operand, []).append(i)
        parameters = sorted(
            (i for i in instructions if i.opcode == "parameter"), key=lambda i: int(i.attributes["number"])
        )
        read, in_place = 0.0, 0.0
        for own, shapes in zip(parameters, operands, strict=False):
            size, uses = sum(shape.bytes for shape in shapes), users.get(own.name, [])
            if uses and all(use.opcode in _SLICES and use.operands[0] == own.name for use in uses):
                size = min(size, sum(use.shapes[0].bytes for use in uses))
            elif uses and all(use.opcode == "dynamic-update-slice" and use.operands[0] == own.name for use in uses):
                update = sum(self.shapes[name][use.operands[1]][0].bytes for use in uses)
                in_place, size = in_place + size - update, 0.0
            read += size
        return read, max(sum(shape.bytes for shape in results) - in_place, 0.0)


def _contraction(left: Shape, right: Shape, own: set[int]) -> float:
    """`own`: dimensions of the right operand that are contracted or of the batch."""
    return 2.0 * left.size * math.prod(size for d, size in enumerate(right.dims) if d not in own)


def _sum(rows: Any) -> float:
    return float(sum(shape.bytes for row in rows for shape in row))


def _moved(i: Instruction, operands: list[tuple[Shape, ...]]) -> tuple[float, float]:
    """Bytes that an instruction outside of a fusion reads and writes."""
    written = _sum((i.shapes,))
    if i.opcode in _SLICES:
        return written + _sum(operands[1:]), written
    if i.opcode == "dynamic-update-slice":
        return _sum(operands[1:2]), _sum(operands[1:2])
    if i.opcode == "scatter":
        return 2 * _sum(operands[-1:]) + _sum(operands[1:2]), _sum(operands[-1:])
    if i.opcode == "copy-start":
        return _sum(operands), _sum(operands)
    return _sum(operands), written


def of_text(
    text: str,
    *,
    cluster: Cluster,
    mesh: Any = None,
    while_trips: int = 1,
    fidelity: str = "folded",
    profiled: str | None = None,
    file: str = "HLO",
) -> steps.Step:
    """Predicts the time of a compiled program on a cluster, from its HLO text.

    The text is that after partitioning: ``jax.jit(f).lower(...).compile().as_text()``, with one device of the program
    for each rank. Each instruction outside of fusions is a kernel.

    Args:
      text: HLO.
      cluster: the cluster; device d of the program is its rank d.
      mesh: names of axes for the output, an AbstractMesh or sizes by axis; the product is the number of devices.
      while_trips: iterations of a while loop whose length the text does not give.
      fidelity: as in ``step``.
      profiled: trace of ``jax.profiler`` (``*.trace.json.gz``) of this program. Kernels take their measured times,
        collectives those of the cluster. The trace is that of one step or of several, on any number of devices.
      file: name for messages.

    Raises:
      StepError: a text that cannot be read, has no collectives, or does not fit the mesh; the text names file and line.
      ClusterError: a cluster that is too small, or groups that do not fit its levels.
    """
    if while_trips < 1:
        raise StepError(f"step: while_trips must be at least 1, got {while_trips}")
    module = hlo_text.parse(text, file)
    sizes = {"device": module.devices} if mesh is None else steps.axes_of(mesh)
    if math.prod(sizes.values()) != module.devices:
        raise StepError(
            f"{file}: the program has {module.devices} devices, but the mesh has {math.prod(sizes.values())} ranks"
        )
    reader = _Reader(module, sizes, while_trips, profile.times(profiled, module.name) if profiled else None)
    block = reader.block(module.entry)
    if profiled and not reader.timed:
        raise StepError(f"{profiled}: no event is an instruction of {file}; profile the same compiled program")
    if not any(True for _ in block.exchanges()):
        raise StepError(f"{file}: the program has no collective; expected compiled.as_text() of several devices")
    return steps.of_block(block, sizes, cluster=cluster, fidelity=fidelity, notes=reader.notes)
