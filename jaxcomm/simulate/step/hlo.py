"""The work of one device in HLO text after SPMD partitioning: kernels, collectives and loops."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxcomm._lowering import replica_groups
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.step import hlo_kernels, hlo_text, predict
from jaxcomm.simulate.step.costs import Costs
from jaxcomm.simulate.step.hlo_text import Instruction, Module
from jaxcomm.simulate.step.result import Step
from jaxcomm.simulate.step.tasks import Block, Exchange, Kernel, Loop, StepError, Task

# Opcode -> public name.
_OPS = {"all-reduce": "psum", "all-gather": "all_gather", "reduce-scatter": "psum_scatter", "all-to-all": "all_to_all",
        "collective-permute": "ppermute", "ragged-all-to-all": "ragged_all_to_all",
        "collective-broadcast": "pbroadcast"}  # fmt: skip
_REDUCTIONS = {"maximum": "pmax", "minimum": "pmin"}
# No work of their own.
_FREE = {"parameter", "constant", "tuple", "bitcast", "after-all", "add-dependency", "partition-id", "replica-id",
         "iota", "opt-barrier", "optimization-barrier", "domain", "get-dimension-size", "rng-get-and-update-state",
         "reshape", "bitcast-convert"}  # fmt: skip
_UNKNOWN = {"send", "recv", "send-done", "recv-done", "infeed", "outfeed"}
_MAX_DEPTH = 100  # of computations that call each other

Needs = Any  # a set of tasks, or of a tuple a list of Needs


def _all(needs: Needs) -> frozenset[int]:
    if isinstance(needs, list):
        return frozenset().union(*map(_all, needs))
    return needs  # type: ignore[no-any-return]


class _Reader:
    """The tasks of a module on a mesh whose devices are numbered row by row.

    A scheduled text with pairs of start and done has the order of a device's stream: each task needs the one before it,
    a done adds its collective to what the next task needs, and a start delays nothing.
    """

    def __init__(self, module: Module, mesh: dict[str, int], while_trips: int):
        self.module, self.mesh, self.while_trips = module, mesh, while_trips
        self.kernels = hlo_kernels.Kernels(module, self.note)
        self.shapes = self.kernels.shapes
        self.pairs = any(
            i.opcode.endswith("-start") for instructions in module.computations.values() for i in instructions
        )
        self.ordered = self.pairs and module.scheduled
        self.notes: dict[str, int] = {}
        self.places: dict[bytes, tuple[tuple[str, ...], Any]] = {}
        self.active: list[str] = []  # computations that are being read
        self.stream: frozenset[int] = frozenset()  # tasks that the next one in the text needs
        self.beside = 0  # depth of computations that run beside the stream

    def note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def block(self, name: str) -> Block:
        tasks: list[Task] = []
        stream, beside, self.stream, self.beside = self.stream, self.beside, frozenset(), 0
        self._run(name, [], tasks)
        self.stream, self.beside = stream, beside
        return Block(tuple(tasks))

    def _run(self, name: str, arguments: list[Needs], tasks: list[Task]) -> Needs:
        """Adds the tasks of a computation, and returns those that its result needs."""
        if name in self.active or len(self.active) > _MAX_DEPTH:
            raise StepError(f"{self.module.file}: the computation {name} calls itself, or calls are too deep")
        self.active.append(name)
        needs: dict[str, Needs] = {}
        issued: dict[str, Needs] = {}  # of instructions that do not wait for their work
        result: Needs = frozenset()
        for i in self.module.computations[name]:
            if i.opcode == "parameter":
                number = int(i.attributes["number"])
                needs[i.name] = arguments[number] if number < len(arguments) else frozenset()
            else:
                before = [needs[operand] for operand in i.operands]
                others = re.findall(r"[\w.\-]+", i.attributes.get("control-predecessors", ""))
                after = [issued.get(other, needs.get(other, frozenset())) for other in others]
                earlier = _all([*before, *after])
                try:
                    needs[i.name] = self._instruction(name, i, before, earlier, tasks)
                except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
                    raise StepError(f"{self.module.where(i)}: not understood: {error!r}") from None
                except ValueError as error:
                    if isinstance(error, StepError):
                        raise
                    raise StepError(f"{self.module.where(i)}: {error}") from None
                if i.opcode.endswith("-start"):
                    issued[i.name] = earlier
            if i.root:
                result = needs[i.name]
        self.active.pop()
        return result

    def _instruction(
        self, name: str, i: Instruction, before: list[Needs], earlier: frozenset[int], tasks: list[Task]
    ) -> Needs:
        base, start = i.opcode.removesuffix("-start"), i.opcode.endswith("-start")

        def add(*works: Kernel | Exchange | Loop) -> frozenset[int]:
            """Several works run one after another's start: all need the same."""
            if not works:
                return earlier
            first, needs = len(tasks), earlier | self.stream if self.ordered else earlier
            tasks.extend(Task(work, tuple(sorted(needs))) for work in works)
            made = frozenset(range(first, len(tasks)))
            if not start and not self.beside:
                self.stream = made
            return made

        if i.opcode == "tuple":
            return before
        if i.opcode == "get-tuple-element":
            index = int(i.attributes.get("index", 0))
            inside = before[0] if before else frozenset()
            return inside[index] if isinstance(inside, list) and index < len(inside) else _all(inside)
        if i.opcode in _UNKNOWN or base in _UNKNOWN:
            raise StepError(f"{self.module.where(i)} is not modelled")
        if i.opcode.endswith(("-done", "-update")):
            if not self.beside:
                self.stream |= earlier
            return earlier
        if base in _OPS:
            return add(*self._collective(name, i, base, start or self.beside > 0))
        if base in _FREE:
            return earlier
        if base in ("call", "async"):
            self.beside += start
            found = self._run(
                hlo_kernels.called(self.module, i, "to_apply", "calls", "called_computation")[0], before, tasks
            )
            self.beside -= start
            return _all(found) | earlier if start else found
        if base == "while":
            return self._while(i, add, earlier)
        if base == "conditional":
            names = hlo_kernels.called(self.module, i, "branch_computations", "true_computation", "false_computation")
            blocks = tuple(self.block(branch) for branch in names)
            self.note("of the branches of a conditional, the slowest counts")
            return add(Loop("cond", blocks, 1, self.module.site(i))) if any(b.tasks for b in blocks) else earlier
        if start and base != "copy":
            i = self._started(name, i, base)
        kernel = self.kernels.kernel(name, i)
        return add(kernel) if kernel else earlier

    def _started(self, name: str, i: Instruction, base: str) -> Instruction:
        """The operation that a start begins. The result of a start holds operands, results and scalars of its own."""
        count = sum(len(self.shapes[name][operand]) for operand in i.operands)
        results = list(i.shapes[count:])
        while len(results) > 1 and not results[-1].dims:
            results.pop()
        return dataclasses.replace(i, opcode=base, shapes=tuple(results))

    def _while(self, i: Instruction, add: Callable[..., frozenset[int]], earlier: frozenset[int]) -> frozenset[int]:
        """Iterations of the condition and the body, and the condition that ends the loop."""
        condition, body = (self.block(hlo_kernels.called(self.module, i, key)[0]) for key in ("condition", "body"))
        if not condition.tasks and not body.tasks:
            return earlier
        site = self.module.site(i)
        found = add(Loop("while", (condition.then(body),), self._trips(i), site))
        return found | add(Loop("while", (condition,), 1, site)) if condition.tasks else found

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
        if base == "all-reduce" and "to_apply" in i.attributes:
            op = _REDUCTIONS.get(self.module.root(hlo_kernels.called(self.module, i, "to_apply")[0]).opcode, op)
        in_place = base == "collective-permute" and "slice_sizes" in i.attributes
        operands = i.operands[:1] if base == "ragged-all-to-all" or in_place else i.operands
        shapes = [shape for operand in operands for shape in self.shapes[name][operand]]
        if self.kernels.promoted(i):
            self.note(hlo_kernels.PROMOTED)
            shapes = [dataclasses.replace(shape, type="bf16") if shape.type == "f32" else shape for shape in shapes]
        try:
            groups = perm = None
            if base == "collective-permute":
                axes, perm = self._pairs(i.attributes.get("source_target_pairs", ""))
            else:
                axes, groups = self._groups(i, base)
        except ValueError as error:
            raise StepError(f"{self.module.where(i)}: {error}") from None
        if not start and not self.pairs:
            self.note("the text has no pairs of start and done; collectives run beside computation")
        counts: dict[str, int] = {}
        for shape in shapes:
            packed = shape.bits < 8
            dtype, count = ("uint8", math.ceil(shape.bytes)) if packed else (shape.dtype, shape.size)
            counts[dtype] = counts.get(dtype, 0) + count
        self.note("collectives take the time of jaxcomm's plan")
        site, asynchronous = self.module.site(i), start or not self.pairs
        return [
            Exchange(op, axes, count, dtype, site, asynchronous, groups=groups, perm=perm)
            for dtype, count in counts.items()
        ]

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


def of_text(
    text: str,
    *,
    cluster: Cluster,
    mesh: Any = None,
    while_trips: int = 1,
    file: str = "HLO",
) -> Step:
    """Predicts the time of a compiled program on a cluster, from its HLO text.

    The text is that after partitioning: ``jax.jit(f).lower(...).compile().as_text()``, with one device of the program
    for each rank. Each instruction outside of fusions is a kernel.

    Args:
      text: HLO.
      cluster: the cluster; device d of the program is its rank d.
      mesh: names of axes for the output, an AbstractMesh or sizes by axis; the product is the number of devices.
      while_trips: iterations of a while loop whose length the text does not give.
      file: name for messages.

    Raises:
      StepError: a text that cannot be read, has no collectives, or does not fit the mesh; the text names file and line.
      ClusterError: a cluster that is too small, or groups that do not fit its levels.
    """
    if while_trips < 1:
        raise StepError(f"step: while_trips must be at least 1, got {while_trips}")
    module = hlo_text.parse(text, file)
    sizes = {"device": module.devices} if mesh is None else predict.axes_of(mesh)
    if math.prod(sizes.values()) != module.devices:
        raise StepError(
            f"{file}: the program has {module.devices} devices, but the mesh has {math.prod(sizes.values())} ranks"
        )
    reader = _Reader(module, sizes, while_trips)
    block = reader.block(module.entry)
    if not any(True for _ in block.exchanges()):
        raise StepError(f"{file}: the program has no collective; expected compiled.as_text() of several devices")
    return predict.of_block(block, Costs(cluster, sizes), reader.notes)
