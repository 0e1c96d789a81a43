"""Operations and bytes of the kernels in HLO text: products, library calls, fusions, slices and updates."""

import math
import re
from collections.abc import Callable
from typing import Any

from jaxcomm.simulate.step import roofline
from jaxcomm.simulate.step.hlo_text import Instruction, Module, Shape
from jaxcomm.simulate.step.tasks import Kernel, StepError

_SLICES = ("slice", "dynamic-slice", "gather")


def dims(instruction: Instruction, name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", instruction.attributes.get(name, ""))]


def called(module: Module, instruction: Instruction, *names: str) -> list[str]:
    """Names of the computations in these attributes. There is at least one, and all exist.

    Raises:
      StepError: else.
    """
    found = []
    for name in names:
        if name in instruction.attributes:
            found += re.findall(r"[\w.\-]+", instruction.attributes[name])
    for name in found:
        if name not in module.computations:
            raise StepError(f"{module.where(instruction)}: the computation {name} is missing")
    if not found:
        raise StepError(f"{module.where(instruction)}: expected an attribute {' or '.join(names)}")
    return found


class Kernels:
    """The kernels of a module. `note` takes assumptions."""

    def __init__(self, module: Module, note: Callable[[str], None]):
        self.module, self.note = module, note
        self.shapes = {
            name: {i.name: i.shapes for i in instructions} for name, instructions in module.computations.items()
        }
        self.by_name = {name: {i.name: i for i in own} for name, own in module.computations.items()}
        self.users: dict[str, dict[str, list[Instruction]]] = {name: {} for name in module.computations}
        for name, instructions in module.computations.items():
            for i in instructions:
                for operand in i.operands:
                    self.users[name].setdefault(operand, []).append(i)
        self.active: list[str] = []  # fusions that are being read

    def kernel(self, name: str, i: Instruction) -> Kernel | None:
        """The kernel of an instruction of the computation `name`; None if it has none."""
        operands = [self.shapes[name][operand] for operand in i.operands]
        arrays = [shape for shapes in (*operands, i.shapes) for shape in shapes]
        if all(shape.size <= 1 for shape in arrays) or self._promotion(name, i):
            return None  # scalars
        site = self.module.site(i)
        if i.opcode == "custom-call":
            return self._custom(i, operands, site)
        narrow = [self._before(name, operand) or self.shapes[name][operand] for operand in i.operands]
        if i.opcode == "fusion":
            inside = called(self.module, i, "calls")[0]
            flops, dtype = self._products(inside, narrow)
            read, written = self._fused(inside, narrow if flops else operands, i.shapes)
            if flops and narrow != operands:
                self.note(PROMOTED)
            return Kernel(self.module.root(inside).opcode, flops, read + written, dtype, site)
        flops, dtype = self._product(i, narrow)
        if flops and narrow != operands:
            self.note(PROMOTED)
        read, written = _moved(i, narrow if flops else operands)
        return Kernel(i.opcode, flops, read + written, dtype, site)

    # Types that XLA:CPU widens

    def _inside(self, i: Instruction) -> list[Instruction]:
        """The instructions of a fusion."""
        return (
            self.module.computations.get(i.attributes.get("calls", "").lstrip("%"), []) if i.opcode == "fusion" else []
        )

    def _before(self, name: str, operand: str) -> tuple[Shape, ...] | None:
        """The narrower array that an operand is converted from; None if it is not."""
        i = self.by_name[name][operand]
        root, where = i, name
        if i.opcode == "fusion" and self._inside(i):
            where = i.attributes["calls"].lstrip("%")
            root = self.module.root(where)
            while root.opcode in _COPIES and root.opcode != "convert" and root.operands:
                root = self.by_name[where][root.operands[0]]
        if root.opcode != "convert" or not root.operands:
            return None
        before, after = self.shapes[where][root.operands[0]], root.shapes
        return before if len(before) == len(after) == 1 and _is_wider(after[0], before[0]) else None

    def promoted(self, i: Instruction) -> bool:
        """Whether XLA has widened the type of a reduction; it then renames what the reduction applies."""
        return i.attributes.get("to_apply", "").endswith("_promoted")

    def _takes_narrow(self, name: str, i: Instruction) -> bool:
        if i.opcode == "dot":
            return all(self._before(name, operand) for operand in i.operands)
        if any(self._before(name, operand) for operand in i.operands) and i.opcode == "fusion":
            return any(x.opcode == "dot" for x in self._inside(i))
        return self.promoted(i)

    def _promotion(self, name: str, i: Instruction) -> bool:
        """Whether an instruction only converts for an operation that XLA:CPU executes with a wider type."""
        if i.opcode not in ("convert", "fusion") or len(i.operands) != 1 or len(i.shapes) != 1:
            return False
        if any(x.opcode not in _COPIES for x in self._inside(i)):
            return False
        if self._before(name, i.name):
            users = self.users[name].get(i.name, [])
            return bool(users) and all(self._takes_narrow(name, user) for user in users)
        source = self.by_name[name][i.operands[0]]
        narrower = len(source.shapes) == 1 and _is_wider(source.shapes[0], i.shapes[0])
        return narrower and self._takes_narrow(name, source)

    # Work

    def _custom(self, i: Instruction, operands: list[tuple[Shape, ...]], site: str) -> Kernel | None:
        target = i.attributes.get("custom_call_target", "").strip('"')
        if target.startswith("jaxcomm"):
            raise StepError(f"{self.module.where(i)}: {target} is read from the program, not from its HLO; use TARGET")
        if target in ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape") or target.startswith("xla.sdy"):
            raise StepError(f"{self.module.where(i)}: the text is not partitioned; expected compiled.as_text()")
        flops, dtype = 0.0, ""
        config = i.config()
        inside = config.get("gemm_backend_config", config)
        numbers = inside.get("dot_dimension_numbers") if isinstance(inside, dict) else None
        if isinstance(numbers, dict) and len(operands) > 1 and operands[0] and operands[1]:
            left, right = operands[0][0], operands[1][0]
            names = ("rhs_contracting_dimensions", "rhs_batch_dimensions")
            own = {int(d) for key in names for d in numbers.get(key, [])}
            flops, dtype = _contraction(left, right, own), left.dtype
        else:
            self.note("custom calls have the bytes of their arrays, and no operations")
        return Kernel(target or "custom-call", flops, _sum((*operands, i.shapes)), dtype, site)

    def _product(self, i: Instruction, operands: list[tuple[Shape, ...]]) -> tuple[float, str]:
        """Operations, and the type of the left operand, or of the right one if it is wider."""
        if i.opcode not in ("dot", "ragged-dot", "convolution"):
            return 0.0, ""
        if len(operands) < 2 or not operands[0] or not operands[1] or not i.shapes:
            raise StepError(f"{self.module.where(i)}: expected two operands and a result")
        left, right, result = operands[0][0], operands[1][0], i.shapes[0]
        dtype = (right if _is_wider(right, left) else left).dtype
        if i.opcode == "dot":
            own = {*dims(i, "rhs_contracting_dims"), *dims(i, "rhs_batch_dims")}
            return _contraction(left, right, own), dtype
        if i.opcode == "ragged-dot":
            return 2.0 * left.size * (result.dims[-1] if result.dims else 1), dtype
        return self._convolution(i, left, right, result), dtype

    def _convolution(self, i: Instruction, left: Shape, right: Shape, result: Shape) -> float:
        labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attributes.get("dim_labels", ""))
        if labels is None:
            raise StepError(f"{self.module.where(i)}: dim_labels are missing")
        window = dict(re.findall(r"(\w+)=([-\w]+)", i.attributes.get("window", "")))
        spatial = sorted(set(labels[1]) - set("bf"))
        one = "x".join(["1"] * len(spatial))
        try:
            if not spatial:
                return _contraction(left, right, {labels[2].index("i")})
            rows = [[int(n) for n in window.get(key, one).split("x")] for key in ("stride", "lhs_dilate", "rhs_dilate")]
            low = [int(pad.split("_")[0]) for pad in window.get("pad", one.replace("1", "0_0")).split("x")]
            count = 2.0 * right.dims[labels[2].index("i")] * _at(result, labels[3], "b") * _at(result, labels[3], "f")
            for d, stride, base, dilation, pad in zip(spatial, *rows, low, strict=True):
                sizes = (_at(left, labels[1], d), _at(right, labels[2], d), _at(result, labels[3], d))
                count *= roofline.valid_positions(*sizes, stride, pad, base, dilation)
        except (ValueError, IndexError, MemoryError):
            raise StepError(f"{self.module.where(i)}: window and dim_labels do not fit the operands") from None
        return count

    def _products(self, name: str, given: list[tuple[Shape, ...]]) -> tuple[float, str]:
        """Operations of all products of a fusion with the operands `given`, and the type of the first."""
        if name in self.active:
            raise StepError(f"{self.module.file}: the computation {name} calls itself")
        self.active.append(name)
        flops, dtype = 0.0, ""
        for i in self.module.computations[name]:
            operands = []
            for operand in i.operands:
                source, found = self.by_name[name][operand], self.shapes[name][operand]
                if source.opcode == "parameter" and int(source.attributes["number"]) < len(given):
                    found = given[int(source.attributes["number"])]
                operands.append(self._before(name, operand) or found)
            more, own = self._product(i, operands)
            if i.opcode in ("fusion", "call"):
                more, own = self._products(called(self.module, i, "calls", "to_apply")[0], operands)
            flops, dtype = flops + more, dtype or own
        self.active.pop()
        return flops, dtype

    def _fused(self, name: str, operands: list[tuple[Shape, ...]], results: tuple[Shape, ...]) -> tuple[float, float]:
        """Bytes read and written. Of an operand of which the fusion reads slices only, these count."""
        instructions, users = self.module.computations[name], self.users[name]
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


PROMOTED = "products and reductions that XLA:CPU executes in float32 count with the type before the conversion"
_COPIES = ("parameter", "convert", "bitcast", "copy", "reshape", "transpose")


def _is_wider(one: Shape, other: Shape) -> bool:
    """Whether both hold the same numbers of floating point, and `one` takes more bytes."""
    floating = all(re.match(r"b?f\d", shape.type) for shape in (one, other))
    return floating and one.size == other.size and one.bytes > other.bytes


def _at(shape: Shape, labels: str, label: str) -> int:
    return shape.dims[labels.index(label)]


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
