"""Reader of HLO text: computations, instructions, shapes and device groups."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxcomm.simulate.step.tasks import StepError

_ITEM = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_NAMES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
_BITS = re.compile(r"(?:[su](?:1|2|4|8|16|32|64)|f(?:4|8)e\w+|f6e\w+)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{[^}]*E\((\d+)\)[^}]*\})?")
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(\(.*\)\s*->\s*.*)?\{$")
_START = re.compile(r"(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPEN, _CLOSE = "([{", ")]}"


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array of HLO. An element takes whole bytes unless the layout packs elements of `packed` bits."""

    type: str
    dims: tuple[int, ...]
    packed: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Of an element."""
        if self.type in _ITEM:
            return 8 * _ITEM[self.type]
        found = re.match(r"[a-z](\d+)", self.type)
        return self.packed or max(int(found[1]) if found else 8, 8)

    @property
    def bytes(self) -> float:
        return self.size * self.bits / 8

    @property
    def dtype(self) -> str:
        """Its name in NumPy."""
        if self.type in _NAMES:
            return _NAMES[self.type]
        if re.match(r"f[468]e", self.type):
            return f"float{self.type[1]}_{self.type[2:]}"
        return re.sub(r"^([suf])(\d+)$", lambda m: {"s": "int", "u": "uint", "f": "float"}[m[1]] + m[2], self.type)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line. `shapes` are the arrays of its result; `attributes` are texts by name."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: dict[str, str]
    root: bool
    line: int

    def config(self) -> dict[str, Any]:
        """The configuration of the back end; empty if it is no JSON object."""
        try:
            found = json.loads(self.attributes.get("backend_config", "{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclasses.dataclass
class Module:
    """A program.

    Attributes:
      file: for messages.
      name: of the module.
      computations: instructions by name of the computation, in the order of the text.
      entry: name of the first computation that runs.
      devices, replicas: partitions times replicas, and replicas.
      scheduled: whether instructions run in the order of the text.
      frames: file and line by number of the stack frame.
    """

    file: str
    name: str
    computations: dict[str, list[Instruction]]
    entry: str
    devices: int
    replicas: int
    scheduled: bool
    frames: dict[int, str]

    def root(self, name: str) -> Instruction:
        return next((i for i in self.computations[name] if i.root), self.computations[name][-1])

    def site(self, instruction: Instruction) -> str:
        """File and line of the program; else the name of the operation."""
        metadata = instruction.attributes.get("metadata", "")
        if found := re.search(r'source_file="([^"]*)"\s+source_line=(\d+)', metadata):
            return f"{found[1].rpartition('/')[2]}:{found[2]}"
        if (found := re.search(r"stack_frame_id=(\d+)", metadata)) and int(found[1]) in self.frames:
            return self.frames[int(found[1])]
        found = re.search(r'op_name="([^"]*)"', metadata)
        return found[1] if found else instruction.name

    def where(self, instruction: Instruction) -> str:
        return f"{self.file}: line {instruction.line}: {instruction.opcode} {instruction.name}"


def _outside(text: str) -> Iterator[tuple[int, str, int]]:
    """Each position outside of strings, its character, and the number of brackets that are open after it."""
    depth, quoted, at = 0, False, 0
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        else:
            depth += (char in _OPEN) - (char in _CLOSE)
            yield at, char, depth
        at += 1


def split(text: str) -> Iterator[str]:
    """Parts between commas that are outside of brackets and strings."""
    start = 0
    for at, char, depth in _outside(text):
        if char == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()


def _balanced(text: str) -> int:
    """The position after the bracket that closes the first character."""
    for at, _, depth in _outside(text):
        if not depth:
            return at + 1
    raise ValueError("a bracket is not closed")


def shapes(text: str) -> tuple[Shape, ...]:
    """All arrays of a type, also of nested tuples."""
    found = []
    for name, dims, packed in _SHAPE.findall(text):
        if name not in _ITEM and not _BITS.match(name):
            raise ValueError(f"the type {name} is not known")
        sizes = tuple(int(size.replace("<=", "")) for size in dims.split(",") if size.strip())
        found.append(Shape(name, sizes, int(packed or 0)))
    return tuple(found)


def _instruction(text: str, line: int) -> Instruction:
    start = _START.match(text)
    if start is None:
        raise ValueError("expected NAME = TYPE OPERATION(...)")
    rest = start[3]
    end = _balanced(rest) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].strip()
    opcode, bracket, _ = rest.partition("(")
    if not bracket or not re.fullmatch(r"[\w\-]+", opcode):
        raise ValueError("expected OPERATION(...) after the type")
    body = rest[len(opcode) :]
    end = _balanced(body)
    operands = [part.split()[-1].lstrip("%") for part in split(body[1 : end - 1])]
    attributes = {}
    for part in split(body[end:].lstrip(", ")):
        key, _, value = part.partition("=")
        attributes[key.strip()] = value.strip()
    if "device_ids" in attributes:  # of the mesh before it
        attributes["replica_groups"] += ",device_ids=" + attributes.pop("device_ids")
    if opcode == "parameter":
        attributes["number"] = str(int(operands[0]))
    if opcode in ("constant", "parameter", "iota"):
        operands = []
    return Instruction(start[2], opcode, shapes(result), tuple(operands), attributes, bool(start[1]), line)


def _frames(lines: list[str]) -> dict[int, str]:
    """Files and lines of the tables before the first computation."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] = {}
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif found := re.match(r"(\d+) (.*)$", line):
            current[int(found[1])] = found[2]
    frames = {}
    for number, frame in tables.get("StackFrames", {}).items():
        place = re.search(r"file_location_id=(\d+)", frame)
        location = tables.get("FileLocations", {}).get(int(place[1]), "") if place else ""
        name = re.search(r"file_name_id=(\d+)", location)
        row = re.search(r"\bline=(\d+)", location)
        if name and row:
            path = tables.get("FileNames", {}).get(int(name[1]), "").strip('"')
            frames[number] = f"{path.rpartition('/')[2]}:{row[1]}"
    return frames


def parse(text: str, file: str = "HLO") -> Module:
    """The module of a text, such as that of ``jax.jit(f).lower(...).compile().as_text()``.

    Raises:
      StepError: a line that is not understood; the text names file and line.
    """
    head, computations, entry, open_at = "", {}, "", ""  # type: ignore[var-annotated]
    before: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if not line:
            continue
        if line.startswith("HloModule"):
            if head:
                raise StepError(f"{file}: line {number}: another HloModule; expected the text of one program")
            head = line
        elif not open_at:
            found = _HEADER.match(line)
            if found is None:
                before.append(line)
                continue
            open_at = found[2]
            computations[open_at] = []
            entry = open_at if found[1] else entry
        elif line.startswith("}"):
            if not computations[open_at]:
                raise StepError(f"{file}: line {number}: the computation {open_at} is empty")
            open_at = ""
        else:
            try:
                computations[open_at].append(_instruction(line, number))
            except (ValueError, IndexError, KeyError) as error:
                raise StepError(f"{file}: line {number}: {error}; got {line[:80]!r}") from None
    if not head or not computations or open_at:
        missing = (
            "a line with HloModule" if not head else "a computation" if not computations else f"the end of {open_at}"
        )
        raise StepError(f"{file}: not HLO text: {missing} is missing; expected compiled.as_text()")
    counts = {key: int(n) for key, n in re.findall(r"(num_partitions|replica_count)=(\d+)", head)}
    replicas = counts.get("replica_count", 1)
    devices = counts.get("num_partitions", 1) * replicas
    name = head.removeprefix("HloModule").split(",")[0].strip()
    scheduled = "is_scheduled=true" in head
    if devices < 1:
        raise StepError(f"{file}: expected at least one partition and replica, got {devices} devices")
    module = Module(
        file, name, computations, entry or list(computations)[-1], devices, replicas, scheduled, _frames(before)
    )
    for instructions in computations.values():
        names: set[str] = set()
        for instruction in instructions:
            for operand in instruction.operands:
                if operand not in names:
                    raise StepError(f"{module.where(instruction)}: the operand {operand} is not defined before it")
            names.add(instruction.name)
    return module


_MESH = re.compile(r"mesh\[([^\]]*)\](?:,device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))?\{([^}]*)\}")


def _iota(base: str, order: str | None, devices: int) -> np.ndarray:
    """Numbers in the shape `base`, with its dimensions in this order."""
    shape = [int(n) for n in base.split(",")]
    if math.prod(shape) > devices:
        raise ValueError(f"expected distinct devices below {devices}, got [{base}]")
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids


def _axes(sizes: str, names: str, devices: int) -> np.ndarray:
    """Groups of positions over named axes of a mesh. ``'a':(2)4`` is the part of 4 of an axis, inside of a part of 2.

    Raises:
      ValueError: an axis that does not exist, or parts that do not divide it.
    """
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    if math.prod(mesh.values()) > devices:
        raise ValueError(f"expected distinct devices below {devices}, got mesh[{sizes}]")
    wanted: list[tuple[str, int, int]] = []  # axis, and where its part begins and ends
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names):
        if name not in mesh:
            raise ValueError(f"the mesh [{sizes}] has no axis {name!r}")
        first, size = int(before or 1), int(part or mesh[name])
        if mesh[name] % (first * size):
            raise ValueError(f"axis {name!r} of size {mesh[name]} has no part ({first}){size}")
        wanted.append((name, first, first * size))
    factors: list[tuple[str, int, int]] = []
    for name, size in mesh.items():
        cuts = sorted({1, size, *(cut for own, first, last in wanted if own == name for cut in (first, last))})
        factors += [(name, first, last) for first, last in itertools.pairwise(cuts)]
    inside = [
        at
        for name, first, last in wanted
        for at, factor in enumerate(factors)
        if factor[0] == name and first <= factor[1] and factor[2] <= last
    ]
    ids = np.arange(math.prod(mesh.values())).reshape([last // first for _, first, last in factors])
    outside = [at for at in range(len(factors)) if at not in inside]
    return ids.transpose(outside + inside).reshape(-1, math.prod(ids.shape[at] for at in inside))


def groups(text: str, devices: int) -> np.ndarray:
    """Replica groups by row: ``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)``, ``mesh['a'=2,'b'=4] {'b'}``, or empty for one
    group of all devices. A mesh may list its devices: ``mesh['a'=4], device_ids=(0,2,1,3) {'a'}``, or
    ``device_ids=([2,2]T(1,0))``.

    Raises:
      ValueError: another form, groups of different sizes, or devices that do not exist.
    """
    text = text.replace(" ", "")
    if found := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(n) for n in found[1].split(",")]
        if len(shape) != 2:
            raise ValueError(f"expected groups of two dimensions, got {text}")
        rows = _iota(found[2], found[3], devices).reshape(shape)
    elif found := _MESH.fullmatch(text):
        rows = _axes(found[1], found[5], devices)
        if found[2] or found[4]:
            listed = _iota(found[2], found[3], devices) if found[2] else np.array(found[4].split(","), int)
            order = listed.ravel()
            if len(order) != rows.size:
                raise ValueError(f"expected {rows.size} devices of a mesh, got {text[:80]}")
            rows = order[rows]
    elif text in ("", "{}"):
        rows = np.arange(devices)[None]
    elif re.fullmatch(r"\{(\{[\d,]*\},?)+\}", text):
        lists = [[int(n) for n in row.split(",") if n] for row in re.findall(r"\{([\d,]*)\}", text[1:-1])]
        if len({len(row) for row in lists}) > 1:
            raise ValueError(f"groups of different sizes are not simulated, got {text[:80]}")
        rows = np.array(lists, int)
    else:
        raise ValueError(f"expected lists of devices, [groups,size]<=[devices] or axes of a mesh, got {text[:80]}")
    if rows.size == 0 or rows.max() >= devices or len(np.unique(rows)) < rows.size:
        raise ValueError(f"expected distinct devices below {devices}, got {text[:80]}")
    return rows
