"""Measures jaxcomm's collectives on the CPU devices of this machine: the rows of `validate-here`.

The launcher starts this module in every process of a shape. Process 0 writes the rows:

    python -m jaxcomm.run --processes 2 --devices 4 -m jaxcomm.simulate.here_rows --out ROWS.csv --name "2 x 4"
"""

import argparse
import csv
import dataclasses
import itertools
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _request
from jaxcomm._core import plan
from jaxcomm._processes import placement
from jaxcomm.distributed import initialize

SIZES = tuple(512 << (3 * k) for k in range(6))  # 512 B to 16 MiB
SCOPES = ("process", "node", "network")
_SHORT_BYTES = 512 << 10  # up to this size, chains are long and repeated more often
_ITEM_BYTES = 4
_SEED = 16

OPS: dict[str, Callable[[Any, str], Any]] = {
    "barrier": lambda x, a: jaxcomm.barrier(x, "i", algorithm=a),
    "psum": lambda x, a: jaxcomm.psum(x, "i", algorithm=a),
    "psum_scatter": lambda x, a: jaxcomm.psum_scatter(x, "i", tiled=True, algorithm=a),
    "all_gather": lambda x, a: jaxcomm.all_gather(x, "i", tiled=True, algorithm=a),
    "all_to_all": lambda x, a: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True, algorithm=a),
    "ppermute": lambda x, a: jaxcomm.ppermute(x, "i", _ring(), algorithm=a),
    "pbroadcast": lambda x, a: jaxcomm.pbroadcast(x, "i", 0, algorithm=a),
}


def _ring() -> list[tuple[int, int]]:
    n = jax.lax.axis_size("i")
    return [(rank, (rank + 1) % n) for rank in range(n)]


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured collective.

    Attributes:
      shape: name of the shape of processes.
      scope: "process", "node" or "network".
      ranks, ranks_per_node, processors: of the group; processors of one node.
      op, algorithm: public name, plan.
      bytes: the larger of operand and result of one rank.
      chunk: elements of a chunk of the plan; 0 means none.
      time_us: median over the rounds. The time of a round is that of its fastest chain: other programs of the machine
        only add time.
      low_us, high_us: quartiles over the rounds.
      rounds: number of rounds.
    """

    shape: str
    scope: str
    ranks: int
    ranks_per_node: int
    processors: int
    op: str
    algorithm: str
    bytes: int
    chunk: int
    time_us: float
    low_us: float
    high_us: float
    rounds: int


def operand(op: str, num_bytes: int, n: int) -> int:
    """Elements of the operand of one rank, such that the larger of operand and result has about these bytes."""
    if op == "barrier":
        return 1
    count = max(num_bytes // _ITEM_BYTES // n, 1)
    return count if op == "all_gather" else count * n


def request(op: str, num_bytes: int, scope: str, n: int, ranks_per_node: int) -> Any:
    """The planner's request, without chunks."""
    x = jax.ShapeDtypeStruct((operand(op, num_bytes, n),), np.int32)
    call, _ = _request.blocks(op, x, n, 0, None)
    return plan.cpu_request(_request.native_name(op), scope, n, ranks_per_node, **call)


def _chain(mesh: Mesh, op: str, algorithm: str, length: int) -> Callable[[Any], Any]:
    """Ops that depend on each other by one element, so that nothing else is copied between them."""

    def once(_: Any, x: Any) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(x, OPS[op](x, algorithm)[:1], 0, 0)

    def chain(x: Any) -> Any:
        return jax.lax.fori_loop(0, length, once, x)

    mapped = jax.shard_map(chain, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


class _Cell:
    """A compiled chain and its times, one for each round."""

    def __init__(self, mesh: Mesh, op: str, algorithm: str, num_bytes: int, chunk: int, lengths: tuple[int, int]):
        self.op, self.algorithm, self.bytes, self.chunk = op, algorithm, num_bytes, chunk
        self.count = operand(op, num_bytes, mesh.size)
        self.samples: list[float] = []
        self._token: Any = None
        short = num_bytes <= _SHORT_BYTES
        self._length, self._repeats = (lengths[0], 5) if short else (lengths[1], 3)
        self._run = _chain(mesh, op, algorithm, self._length)
        self._sharding = NamedSharding(mesh, P("i"))

    def _place(self) -> Any:
        total = self._sharding.mesh.size * self.count
        return jax.make_array_from_callback((total,), self._sharding, lambda index: np.zeros(total, np.int32)[index])

    def align(self) -> None:
        """Executes the chain once, without a sample."""
        self._token = jax.block_until_ready(self._run(self._place() if self._token is None else self._token))

    def measure(self, align: Callable[[], Any]) -> None:
        x = jax.block_until_ready(self._run(self._place()))  # the first execution builds the plan
        times = []
        for _ in range(self._repeats):
            align()
            begin = time.perf_counter()
            x = jax.block_until_ready(self._run(x))
            times.append((time.perf_counter() - begin) / self._length)
        self.samples.append(min(times))


def measure(
    name: str,
    sizes: Sequence[int],
    rounds: int,
    lengths: tuple[int, int],
    ops: Sequence[str],
    say: Callable[[str], Any],
) -> Iterator[list[Row]]:
    """Measures all ops, sizes and algorithms on all devices. All processes must call it. Yields rows after each round.

    Args:
      name: of the shape.
      sizes: bytes, as in `Row`.
      rounds: each measures all collectives in another order.
      lengths: ops of a chain, of short and of long operands.
      ops: public names.
      say: gets a line now and then.
    """
    nodes = placement.nodes()
    node_of = {process: i for i, processes in enumerate(nodes) for process in processes}
    devices = sorted(jax.devices("cpu"), key=lambda d: (node_of[d.process_index], d.process_index, d.id))
    n = len(devices)
    scope = "process" if jax.process_count() == 1 else "node" if len(nodes) == 1 else "network"
    per_node = placement.ranks_per_node([node_of[d.process_index] for d in devices]) if scope == "network" else n
    mesh = Mesh(np.array(devices), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    machine = plan.machine_of(scope, n, per_node)
    cells: list[_Cell] = []
    for op, size in itertools.product(ops, sizes):
        if op == "barrier" and size != sizes[0]:
            continue
        asked = request(op, size, scope, n, per_node)
        for algorithm, _ in plan.algorithms(asked.collective):
            if plan.supports(asked, algorithm) and plan.protocol(asked.collective, algorithm) == "steps":
                chosen = plan.select(asked, algorithm, _ITEM_BYTES, machine).request
                num_bytes = 0 if op == "barrier" else size
                cells.append(_Cell(mesh, op, algorithm, num_bytes, chosen.chunk_count, lengths))
    barrier = _Cell(mesh, "barrier", "dissemination", 0, 0, (1, 1))

    processors = len(os.sched_getaffinity(0))
    for number in range(rounds):
        order = list(cells)
        random.Random(_SEED + number).shuffle(order)  # equal in all processes
        begin = time.perf_counter()
        for cell in order:
            cell.measure(barrier.align)
        say(f"{name}: round {number + 1} of {rounds}, {len(cells)} collectives, {time.perf_counter() - begin:.0f} s")
        rows = []
        for cell in cells:
            low, middle, high = (round(float(us), 2) for us in np.quantile(cell.samples, [0.25, 0.5, 0.75]) * 1e6)
            rows.append(
                Row(name, scope, n, per_node, processors, cell.op, cell.algorithm, cell.bytes, cell.chunk,
                    middle, low, high, number + 1)
            )  # fmt: skip
        yield rows


def write(path: str, rows: Sequence[Row]) -> None:
    """Writes rows as CSV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Row))
        writer.writerows(dataclasses.astuple(row) for row in rows)


def _wrong(row: Row) -> str | None:
    """The first value of a row that cannot be measured."""
    times = {name: getattr(row, name) for name in ("time_us", "low_us", "high_us")}
    for name, value in times.items():
        if not math.isfinite(value) or value <= 0:
            return f"{name}: got {value:g}, expected a finite time of more than 0"
    least = {"bytes": 0, "chunk": 0, "ranks": 2, "ranks_per_node": 1, "processors": 1, "rounds": 1}
    for name, limit in least.items():
        if not limit <= getattr(row, name) < 1 << 62:
            return f"{name}: got {getattr(row, name)}, expected at least {limit} and less than 2^62"
    if row.op not in OPS:
        return f"op: got {row.op!r}, expected a measured collective of {', '.join(OPS)}"
    if row.scope not in SCOPES:
        return f"scope: got {row.scope!r}, expected one of {', '.join(SCOPES)}"
    if row.ranks % row.ranks_per_node:
        return f"ranks_per_node: got {row.ranks_per_node}, expected a divisor of the {row.ranks} ranks"
    if row.scope != "network" and row.ranks != row.ranks_per_node:
        return f"ranks_per_node: got {row.ranks_per_node}, expected all {row.ranks} ranks in scope {row.scope}"
    asked = request(row.op, row.bytes, row.scope, row.ranks, row.ranks_per_node)
    asked.chunk_count = row.chunk
    names = [name for name, _ in plan.algorithms(asked.collective) if plan.supports(asked, name)]
    names = [name for name in names if plan.protocol(asked.collective, name) == "steps"]
    return None if row.algorithm in names else f"algorithm: got {row.algorithm!r}, expected one of {', '.join(names)}"


def read(path: str) -> list[Row]:
    """Raises ValueError, which names file and line, if the table is not one of `write`."""
    fields = dataclasses.fields(Row)
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        if next(reader, []) != [field.name for field in fields]:
            raise ValueError(f"{path}:1: expected the columns {','.join(field.name for field in fields)}")
        rows = []
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if len(cells) != len(fields):
                raise ValueError(f"{where}: expected {len(fields)} columns, got {len(cells)}")
            values: dict[str, Any] = {}
            for field, cell in zip(fields, cells, strict=True):
                try:
                    values[field.name] = field.type(cell)  # type: ignore[operator]
                except ValueError:
                    raise ValueError(f"{where}: {field.name}: got {cell!r}") from None
            row = Row(**values)
            if wrong := _wrong(row):
                raise ValueError(f"{where}: {wrong}")
            rows.append(row)
    return rows


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.simulate.here_rows", description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", default="16,4")
    parser.add_argument("--ops", default=",".join(OPS))
    args = parser.parse_args()
    initialize()
    first = jax.process_index() == 0
    short, long = map(int, args.lengths.split(","))
    for rows in measure(
        args.name,
        [int(size) for size in args.sizes.split(",")],
        args.rounds,
        (short, long),
        args.ops.split(","),
        lambda line: print(line, flush=True) if first else None,
    ):
        if first:
            write(args.out, rows)


if __name__ == "__main__":
    try:
        _main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for the other processes
