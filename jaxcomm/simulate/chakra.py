"""Chakra execution traces: a file per rank, which holds a graph of computation, messages and collectives.

Source of the format: mlcommons/chakra schema/protobuf/et_def.proto. Attributes have the names and types that the
feeders of Chakra and ASTRA-sim read. Sizes are bytes of the operand of one rank, as in ASTRA-sim's collectives.
"""

import dataclasses
import glob
import gzip
import json
import math
import pathlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm._lowering import replica_groups
from jaxcomm.simulate import protobuf
from jaxcomm.simulate.goal import Schedule
from jaxcomm.simulate.predictions import Step
from jaxcomm.simulate.schedule import Timeline
from jaxcomm.simulate.tasks import Exchange, Loop

INVALID, METADATA, MEM_LOAD, MEM_STORE, COMP, SEND, RECV, COLL = range(8)
KINDS = ("INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
         "COMM_RECV_NODE", "COMM_COLL_NODE", "STORAGE_NODE", "BATCH_NODE", "CHECKPOINT_NODE")  # fmt: skip
COLLECTIVES = ("ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER",
               "REDUCE_SCATTER_BLOCK", "BARRIER")  # fmt: skip
# Public name -> collective. Of an all_reduce, the operation does not matter.
_OF_OP = {"psum": 0, "pmean": 0, "pmax": 0, "pmin": 0, "all_gather": 2, "pbroadcast": 5, "all_to_all": 6,
          "ragged_all_to_all": 6, "psum_scatter": 7, "barrier": 9}  # fmt: skip
# Field of AttributeProto that holds an attribute. Older feeders read no other type.
_INT32, _INT64, _UINT64, _BOOL, _BOOLS, _STRING = 7, 9, 13, 27, 28, 29
_FIELDS = {"comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32, "num_ops": _INT64, "comm_type": _INT64,
           "comm_size": _INT64, "tensor_size": _UINT64, "is_cpu_op": _BOOL, "involved_dim": _BOOLS, "pg_name": _STRING,
           "duration_ns": _UINT64, "dtype": _STRING}  # fmt: skip
_FIXED_LETTERS = {3: "d", 5: "f", 19: "I", 21: "Q", 23: "i", 25: "q"}
VERSION = "0.0.4"
_MAX_NODES = 10_000_000  # of all files: a few gigabytes


class TraceError(ValueError):
    """A trace that cannot be read or simulated. The text names file and node."""


@dataclasses.dataclass
class Node:
    """A node of a graph.

    Attributes:
      id, name, kind: number in its file, name, and type as a number of the schema.
      control, data: nodes that end before this one starts.
      micros: duration; 0 if it is unknown.
      attributes: values by name.
    """

    id: int
    name: str
    kind: int
    control: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    micros: int = 0
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        kind = KINDS[self.kind] if self.kind < len(KINDS) else f"type {self.kind}"
        return f"node {self.id} ({self.name or kind})"


def _attribute(name: str, value: Any) -> bytes:
    field = _FIELDS[name]
    out = protobuf.chunk(1, name.encode())
    if field == _STRING:
        return out + protobuf.chunk(field, value.encode())
    if field == _BOOLS:
        return out + protobuf.chunk(field, protobuf.chunk(1, bytes(map(bool, value))))
    return out + protobuf.number(field, int(value))


def encode(node: Node) -> bytes:
    """The message of a node."""
    out = protobuf.number(1, node.id) if node.id else b""
    out += protobuf.chunk(2, node.name.encode()) + protobuf.number(3, node.kind)
    for field, needs in ((4, node.control), (5, node.data)):
        if needs:
            out += protobuf.chunk(field, b"".join(map(protobuf.varint, needs)))
    if node.micros:
        out += protobuf.number(7, node.micros)
    for name, value in node.attributes.items():
        out += protobuf.chunk(10, _attribute(name, value))
    return out


def _value(field: int, wire: int, value: int | bytes) -> Any:
    """The value of an attribute: odd fields hold one, even fields a list of the type before."""
    if field % 2 == 0:
        assert isinstance(value, bytes)
        rows = [(wire, found) for number, wire, found in protobuf.fields(value) if number == 1]
        if field in (30, 32):
            return [_value(field - 1, wire, found) for wire, found in rows]
        if letter := _FIXED_LETTERS.get(field - 1):
            return [x for wire, found in rows for x in protobuf.unpack(wire, found, letter)]  # type: ignore[arg-type]
        return [_value(field - 1, 0, x) for wire, found in rows for x in protobuf.packed(wire, found)]
    if letter := _FIXED_LETTERS.get(field):
        return struct.unpack("<" + letter, value)[0]  # type: ignore[arg-type]
    if field in (29, 31):
        assert isinstance(value, bytes)
        return value.decode() if field == 29 else value
    assert isinstance(value, int)
    if field in (7, 9):
        return protobuf.signed(value)
    if field in (15, 17):
        return protobuf.zigzag(value)
    return bool(value) if field == 27 else value


def decode(data: bytes) -> Node:
    """The node of a message.

    Raises:
      protobuf.WireError: the data is not a node.
    """
    node = Node(0, "", INVALID)
    try:
        for field, wire, value in protobuf.fields(data):
            if field in (1, 3, 7):
                if not isinstance(value, int):
                    raise protobuf.WireError(f"field {field} is no number")
                if field == 1:
                    node.id = value
                elif field == 3:
                    node.kind = value
                else:
                    node.micros = value
            elif field == 2:
                node.name = value.decode()  # type: ignore[union-attr]
            elif field == 4:
                node.control += tuple(protobuf.packed(wire, value))
            elif field == 5:
                node.data += tuple(protobuf.packed(wire, value))
            elif field == 10:
                name, found = "", None
                for inner, kind, part in protobuf.fields(value):  # type: ignore[arg-type]
                    if inner == 1:
                        name = part.decode()  # type: ignore[union-attr]
                    elif 3 <= inner <= 32:
                        found = _value(inner, kind, part)
                node.attributes[name] = found
    except (AttributeError, AssertionError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise protobuf.WireError(f"a field has another type than in the schema ({error})") from None
    return node


def _files(template: str) -> str:
    if template.count("%d") != 1 or template.count("%") != 1:
        raise TraceError(f"{template}: expected one %d, the place of the rank: name.%d.et")
    return template


def _ranks(template: str) -> list[int]:
    """Ranks whose files exist."""
    before, after = _files(template).split("%d")
    paths = glob.glob(f"{glob.escape(before)}*{glob.escape(after)}")
    found = [path[len(before) : len(path) - len(after)] for path in paths]
    return sorted(int(rank) for rank in found if re.fullmatch(r"0|[1-9]\d*", rank, re.ASCII))


def write(template: str, ranks: Sequence[Iterable[Node]]) -> int:
    """Writes a file for each rank: ``template`` with the rank in place of %d. Returns the number of files.

    Raises:
      TraceError: there are files of higher ranks, which a reader would add.
    """
    template = _files(template)
    if stale := [rank for rank in _ranks(template) if rank >= len(ranks)]:
        path = template.replace("%d", str(stale[0]))
        raise TraceError(f"{path}: is of a run with more than {len(ranks)} ranks; remove it or choose another name")
    metadata = protobuf.chunk(1, VERSION.encode())
    for rank, nodes in enumerate(ranks):
        with open(template.replace("%d", str(rank)), "wb") as file:
            file.write(protobuf.varint(len(metadata)) + metadata)
            for node in nodes:
                message = encode(node)
                file.write(protobuf.varint(len(message)) + message)
    return len(ranks)


def read_file(path: str | pathlib.Path) -> list[Node]:
    """The nodes of a file, which may be compressed by gzip.

    Raises:
      TraceError: the file is not a trace; the text names file and node.
      OSError: the file cannot be read.
    """
    data = pathlib.Path(path).read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = list(protobuf.messages(data))
    except (protobuf.WireError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: not an execution trace: {error}") from None
    if not found:
        raise TraceError(f"{path}: not an execution trace: no metadata")
    nodes: list[Node] = []
    for index, message in enumerate(found[1:]):
        try:
            nodes.append(decode(message))
        except protobuf.WireError as error:
            raise TraceError(f"{path}: node at position {index}: {error}") from None
    ids = {node.id for node in nodes}
    if len(ids) < len(nodes):
        seen: set[int] = set()
        twice = next(node for node in nodes if node.id in seen or seen.add(node.id))  # type: ignore[func-returns-value]
        raise TraceError(f"{path}: {twice}: its id occurs twice")
    for node in nodes:
        for need in (*node.control, *node.data):
            if need not in ids:
                raise TraceError(f"{path}: {node}: depends on node {need}, which is not in the file")
    return nodes


def read(template: str) -> list[list[Node]]:
    """The nodes of all ranks: rank 0, 1, and so on.

    Raises:
      TraceError: the file of a rank is missing, or see ``read_file``.
      OSError: there is no file.
    """
    ranks = _ranks(template) or [0]
    for rank, found in enumerate(ranks):
        if rank != found:
            raise TraceError(f"{template.replace('%d', str(rank))}: is missing, but there is one of rank {ranks[-1]}")
    return [read_file(template.replace("%d", str(rank))) for rank in ranks]


class Ranks(Sequence[list[Node]]):
    """The nodes of each rank, made when they are needed."""

    def __init__(self, count: int, of: Callable[[int], list[Node]]):
        self.ranks, self.of = count, of

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self.ranks:
            raise IndexError(rank)
        return self.of(rank)


def of_schedule(schedule: Schedule) -> Ranks:
    """The nodes of a plan, by rank. An operation has control dependencies on earlier operations of its rank, and data
    dependencies on messages that have arrived.
    """

    def on(rank: int) -> list[Node]:
        ops = schedule[rank]
        nodes = []
        for number, op in enumerate(ops):
            arrived = tuple(other for other in op.requires if ops[other].kind == "recv")
            control = tuple(other for other in op.requires if ops[other].kind != "recv")
            values: dict[str, Any] = {"is_cpu_op": False}
            if op.kind == "calc":
                values["duration_ns"] = op.size
                node = Node(number, "calc", COMP, control, arrived, round(op.size / 1000), values)
            else:
                src, dst = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
                values |= {"comm_src": src, "comm_dst": dst, "comm_tag": op.tag, "comm_size": op.size}
                kind = SEND if op.kind == "send" else RECV
                node = Node(number, f"{op.kind} {src} to {dst}", kind, control, arrived, 0, values)
            nodes.append(node)
        return nodes

    return Ranks(len(schedule), on)


class _Tasks:
    """The nodes of a step on any rank. Both streams are chains of control dependencies; loops are unrolled."""

    def __init__(self, mesh: dict[str, int]):
        self.nodes: list[Node] = []
        self.exchanges: dict[int, Exchange] = {}  # by node; a permutation has a message each way, in this order
        self.axes = tuple(mesh)[::-1]  # the innermost dimension comes first
        self.last: dict[str, int] = {}  # node of each stream
        self.after: dict[str, set[int]] = {}  # other nodes that the next node of a stream follows

    def _new(
        self, name: str, kind: int, needs: Sequence[int], streams: Sequence[str], run_s: float, **more: Any
    ) -> int:
        number = len(self.nodes)
        control = {self.last[stream] for stream in streams if stream in self.last}
        for stream in streams:
            control |= self.after.pop(stream, set())
            self.last[stream] = number
        values = {"is_cpu_op": False, **({"duration_ns": round(run_s * 1e9)} if run_s else {}), **more}
        control -= set(needs)
        self.nodes.append(Node(number, name, kind, tuple(sorted(control)), tuple(needs), round(run_s * 1e6), values))
        return number

    def _exchange(self, work: Exchange, needs: Sequence[int], run_s: float) -> tuple[int, ...]:
        name, size = f"{work.op} at {work.site}", work.count * jax.numpy.dtype(work.dtype).itemsize
        streams = ("comm",) if work.asynchronous else ("comp", "comm")
        if work.op == "ppermute":
            made = [self._new(name, kind, needs, streams, 0.0, comm_size=size) for kind in (SEND, RECV)]
            self.exchanges |= dict.fromkeys(made, work)
            return tuple(made)
        if work.op not in _OF_OP:
            raise TraceError(f"{work.op} at {work.site}: the schema has no such collective")
        values = {"comm_type": _OF_OP[work.op], "comm_size": size, "dtype": work.dtype}
        if work.groups is None:
            values["involved_dim"] = [axis in work.axes for axis in self.axes]
        number = self._new(name, COLL, needs, streams, run_s, **values)
        self.exchanges[number] = work
        return (number,)

    def add(self, timeline: Timeline) -> tuple[int, ...]:
        """Returns the last node of each stream."""
        ends: dict[int, tuple[int, ...]] = {}  # nodes by task
        for run in timeline.runs:
            work, run_s = run.task.work, run.end_s - run.start_s
            needs = tuple(sorted({node for need in run.task.needs for node in ends[need]}))
            if isinstance(work, Loop):
                for _ in range(work.trips if run.inside is not None else 0):
                    self._join()
                    self.add(run.inside)  # type: ignore[arg-type]
                self._join()
                ends[run.index] = tuple(sorted(set(self.last.values())))
            elif isinstance(work, Exchange):
                ends[run.index] = self._exchange(work, needs, run_s)
            else:
                values = {"num_ops": round(work.flops), "tensor_size": round(work.bytes), "dtype": work.dtype}
                name = f"{work.name} at {work.site}"
                ends[run.index] = (self._new(name, COMP, needs, ("comp",), run_s, **values),)
        return tuple(sorted(set(self.last.values())))

    def _join(self) -> None:
        """Before and after an iteration, each stream waits for both."""
        tails = set(self.last.values())
        self.after = {"comp": set(tails), "comm": set(tails)}


def _count(timeline: Timeline) -> int:
    """Nodes of one rank."""
    count = 0
    for run in timeline.runs:
        work = run.task.work
        if isinstance(work, Loop):
            count += work.trips * _count(run.inside) if run.inside is not None else 0
        else:
            count += 2 if isinstance(work, Exchange) and work.op == "ppermute" else 1
    return count


def _messages(nodes: list[Node], tasks: _Tasks, rank: int, rows: dict[Any, np.ndarray]) -> None:
    """Fills in the peers of permutations. A rank without a peer gets an invalid node, which takes no time."""
    for index, work in tasks.exchanges.items():
        if work.op != "ppermute":
            continue
        row = next(row for row in rows[work.axes, work.groups] if rank in row).tolist()
        place, node = row.index(rank), nodes[index]
        pairs = work.perm if work.perm is not None else tuple((i, (i + 1) % len(row)) for i in range(len(row)))
        ends = [(s, d) for s, d in pairs if place == (s if node.kind == SEND else d)]
        if not ends or ends[0][0] == ends[0][1]:
            nodes[index] = dataclasses.replace(node, kind=INVALID, attributes={"is_cpu_op": False})
            continue
        (src, dst) = (row[end] for end in ends[0])
        values = {**node.attributes, "comm_src": src, "comm_dst": dst, "comm_tag": index - (node.kind == RECV)}
        nodes[index] = dataclasses.replace(node, attributes=values)


def groups_file(template: str) -> pathlib.Path:
    """The file of communicator groups beside the traces: a JSON object of ranks by name."""
    return pathlib.Path(_files(template).removesuffix(".et").replace("%d", "").rstrip(".") + ".groups.json")


def write_step(template: str, found: Step) -> int:
    """Writes the traces of a step, and its communicator groups, for all ranks of its mesh.

    Returns:
      The number of traces.

    Raises:
      TraceError: the schema has no such collective, the traces would have too many nodes, there are files of higher
        ranks, or the step itself was read from traces.
    """
    if not found.timeline.alike:
        raise TraceError(f"{template}: the step was read from traces, whose ranks differ; copy their files")
    ranks, count = math.prod(found.mesh.values()), _count(found.timeline)
    if ranks * count > _MAX_NODES:
        raise TraceError(f"{ranks} traces of {count} nodes exceed {_MAX_NODES} nodes; use a smaller mesh")
    tasks = _Tasks(found.mesh)
    tasks.add(found.timeline)
    axes, sizes = tuple(found.mesh), tuple(found.mesh.values())
    rows = {
        (work.axes, work.groups): replica_groups(axes, sizes, work.axes, work.groups)
        for work in tasks.exchanges.values()
    }
    names: dict[tuple[int, ...], str] = {}
    of_rank: dict[Any, dict[int, str]] = {}
    for where, groups in rows.items():
        if groups.shape[1] < ranks:  # name "0" is the group of all ranks
            of_rank[where] = {
                int(r): names.setdefault(tuple(map(int, row)), str(len(names) + 1)) for row in groups for r in row
            }

    def on(rank: int) -> list[Node]:
        nodes = list(tasks.nodes)
        for index, work in tasks.exchanges.items():
            if (work.axes, work.groups) in of_rank and work.op != "ppermute":
                values = {**nodes[index].attributes, "pg_name": of_rank[work.axes, work.groups][rank]}
                nodes[index] = dataclasses.replace(nodes[index], attributes=values)
        _messages(nodes, tasks, rank, rows)
        return nodes

    count = write(template, Ranks(ranks, on))
    groups_file(template).write_text(json.dumps({name: list(row) for row, name in names.items()}), encoding="utf-8")
    return count
