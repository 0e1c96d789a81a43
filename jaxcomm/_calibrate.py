"""calibrate(): measures collectives on this machine and fits the cost parameters to the times."""

import dataclasses
import itertools
import json
import pathlib
import statistics
import types
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcomm import _cost_params
from jaxcomm._core import plan
from jaxcomm._measure import collectives, least_squares, timing
from jaxcomm._measure.collectives import COLLECTIVES
from jaxcomm._processes import kv_store, placement
from jaxcomm.ops.all_to_all import all_to_all
from jaxcomm.ops.barrier import barrier
from jaxcomm.ops.psum import psum

_CHAIN = 4  # ops inside one jit: divides the cost of the jit call
_SIZES = (256, 16 << 10, 256 << 10, 2 << 20)  # bytes of an operand
_ALGORITHMS = 3  # per op and size: those with the lowest predicted cost
_SECONDS = 0.15  # of repetitions, but at least three of them
_LIMIT_S = 600.0  # time limit of a wait for the measurements of another process
_numbers = itertools.count()  # numbers the calls of calibrate(), equally in all processes

_OPS = {"barrier": barrier, "psum": psum, "all_to_all": all_to_all}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measured collective.

    Attributes:
      scope: "process", "node" or "network".
      op: public name.
      algorithm: name of its plan.
      bytes: size of the operand of one rank.
      measured_s: median time of one op in a chain inside jit.
      predicted_s: prediction of the cost model with the new parameters.
    """

    scope: str
    op: str
    algorithm: str
    bytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative difference of the two times: 0.25 if one is 1.25 times the other."""
        return max(self.measured_s, self.predicted_s) / min(self.measured_s, self.predicted_s) - 1


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Result of calibrate(). ``str()`` gives a table.

    Attributes:
      cells: the measured collectives.
      path: file that later programs on this machine read. The first process of each node writes it; there, None means
        that it could not.
    """

    cells: tuple[Cell, ...]
    path: pathlib.Path | None

    def __str__(self) -> str:
        lines = [f"{'scope':8} {'op':11} {'algorithm':19} {'bytes':>9} {'measured':>12} {'predicted':>12} {'error':>6}"]
        lines += [
            f"{c.scope:8} {c.op:11} {c.algorithm:19} {c.bytes:9} {c.measured_s * 1e6:9.1f} us "
            f"{c.predicted_s * 1e6:9.1f} us {c.error:6.0%}"
            for c in self.cells
        ]
        for scope in dict.fromkeys(c.scope for c in self.cells):
            errors = [c.error for c in self.cells if c.scope == scope]
            lines.append(f"{scope}: median error {statistics.median(errors):.0%} of {len(errors)}")
        return "\n".join([*lines, f"saved in {self.path}" if self.path else "not saved"])


@dataclasses.dataclass(frozen=True)
class _Group:
    """Devices that measure together, and their shape in the planner."""

    scope: str
    mesh: Mesh
    ranks_per_node: int

    def size(self, op: str, num_bytes: int) -> collectives.Size:
        return collectives.make_size(COLLECTIVES[op], num_bytes, 4, self.mesh.size)

    def request(self, op: str, num_bytes: int) -> Any:
        collective, size = COLLECTIVES[op], self.size(op, num_bytes)
        count = size.count if collective.sized else 0
        return plan.cpu_request(collective.native, self.scope, self.mesh.size, self.ranks_per_node, count)

    def machine(self) -> Any:
        return plan.machine_of(self.scope, self.mesh.size, self.ranks_per_node)


def _groups() -> list[_Group]:
    """The groups to measure: the first process with several devices, the first node with several processes, all nodes.

    A group that the program does not have is left out.
    """
    nodes = placement.nodes()
    devices = jax.devices("cpu")
    found = []
    for process in range(jax.process_count()):
        if len(own := [d for d in devices if d.process_index == process]) > 1:
            found.append(("process", own))
            break
    for processes in nodes:
        if len(processes) > 1:
            found.append(("node", [d for d in devices if d.process_index in processes]))
            break
    if len(nodes) > 1:
        node_of = {process: i for i, processes in enumerate(nodes) for process in processes}
        found.append(("network", sorted(devices, key=lambda d: (node_of[d.process_index], d.process_index, d.id))))
    groups = []
    for scope, members in found:
        names = [next(i for i, ps in enumerate(nodes) if d.process_index in ps) for d in members]
        mesh = Mesh(np.array(members), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        per_node = placement.ranks_per_node(names) if scope == "network" else len(members)
        groups.append(_Group(scope, mesh, per_node))
    return groups


def _median_s(group: _Group, op: str, algorithm: str, num_bytes: int, key: str) -> float:
    """Median time of one op in a chain. All processes of the group must call it."""
    collective, n = COLLECTIVES[op], group.mesh.size
    devices = collectives.Group(group.mesh, "i")
    operands = collectives.make_operands(collective, group.size(op, num_bytes), np.int32, n, _CHAIN)
    chain = collectives.program(collective, types.SimpleNamespace(**_OPS), devices, _CHAIN, {"algorithm": algorithm})
    measure_us = timing.stopwatch(chain, collectives.place(operands, devices))
    measure_us()
    measure_us()  # the first execution builds the plan
    repetitions = min(max(int(_SECONDS * 1e6 / measure_us()), 3), 50)
    repetitions = int(kv_store.kv_agree(key, str(repetitions)))
    return statistics.median(measure_us() for _ in range(repetitions)) / 1e6 / _CHAIN


def _measure(group: _Group, key: str, done: set[tuple[Any, ...]]) -> list[tuple[Any, str, Cell]]:
    """Measures the collectives that are not in `done`.

    Returns:
      A list of (request with its chunks, native algorithm, cell without prediction).
    """
    machine, measured = group.machine(), []
    for op, num_bytes in itertools.product(_OPS, _SIZES):
        if not COLLECTIVES[op].sized and num_bytes != _SIZES[0]:
            continue
        request = group.request(op, num_bytes)
        choices = {}
        for algorithm, _ in plan.algorithms(request.collective):
            # On CPUs, an LL algorithm runs a plan that the table has under another name too.
            if plan.supports(request, algorithm) and plan.protocol(request.collective, algorithm) == "steps":
                choices[algorithm] = plan.select(request, algorithm, 4, machine)
        cheapest = sorted(choices, key=lambda algorithm: choices[algorithm].cost.time_s)[:_ALGORITHMS]
        # Processes with different numbers of processors might choose differently.
        for algorithm in json.loads(kv_store.kv_agree(f"{key}/{op}/{num_bytes}", json.dumps(cheapest))):
            choice = choices[algorithm]
            if (what := (op, num_bytes, choice.algorithm, choice.request.chunk_count)) in done:
                continue
            done.add(what)
            time_s = _median_s(group, op, choice.algorithm, num_bytes, f"{key}/{op}/{num_bytes}/{choice.algorithm}")
            cell = Cell(group.scope, op, choice.algorithm, num_bytes if COLLECTIVES[op].sized else 0, time_s, 0.0)
            measured.append((choice.request, choice.algorithm, cell))
    return measured


# The fitted parameters of each scope: (links, parameter) or launch_s. In the scopes "process" and "node", links between
# declared nodes are equal to links inside them.
_FREE: dict[str, tuple[tuple[str, ...], ...]] = {
    "process": (("launch_s",), ("self+node+network", "overhead_s"), ("self+node+network", "bytes_per_s")),
    "node": (
        ("launch_s",), ("node+network", "overhead_s"), ("node+network", "bytes_per_s"), ("node+network", "latency_s"),
    ),
    "network": (
        ("launch_s",), ("node", "overhead_s"), ("node", "bytes_per_s"), ("node", "latency_s"),
        ("network", "overhead_s"), ("network", "bytes_per_s"), ("network", "latency_s"),
    ),
}  # fmt: skip
_COLUMN = {"overhead_s": 1, "bytes_per_s": 2, "latency_s": 3}
# The center of the prior, and the spread of its logarithms, a factor of 20: parameters with little effect stay near it.
_CENTER = {"overhead_s": 1e-6, "bytes_per_s": 1e9, "latency_s": 1e-6, "launch_s": 2e-5}
_SPREAD = 3.0
_STARTS = ((1e-7, 1e-7), (1e-5, 1e-5), (1e-5, 1e-3), (1e-4, 1e-8))  # overhead_s and latency_s


def _with(machine: Any, free: Sequence[tuple[str, ...]], values: Sequence[float]) -> Any:
    rows = {row[0]: list(row) for row in machine.links}
    launch_s = machine.launch_s
    for parameter, value in zip(free, values, strict=True):
        if parameter[0] == "launch_s":
            launch_s = value
        else:
            for link in parameter[0].split("+"):
                rows[link][_COLUMN[parameter[1]]] = value
    return plan.Machine(
        [tuple(row) for row in rows.values()], launch_s, machine.ranks_per_processor, machine.shared_network
    )


def _fit(machine: Any, scope: str, measured: list[tuple[Any, str, Cell]]) -> Any:
    """Returns the machine with the best free parameters, from several starts."""
    free = _FREE[scope]
    if all(request.ranks_per_node == 1 for request, _, _ in measured):
        free = tuple(parameter for parameter in free if parameter[0] != "node")  # no request uses this link

    def times(logarithms: np.ndarray) -> np.ndarray:
        used = _with(machine, free, np.exp(logarithms).tolist())
        return np.log([plan.cost(request, algorithm, 4, used).time_s for request, algorithm, _ in measured])

    def logarithms(values: dict[str, float]) -> np.ndarray:
        return np.log([values[parameter[-1]] for parameter in free])

    measured_s, spread = np.log([cell.measured_s for _, _, cell in measured]), np.full(len(free), _SPREAD)
    starts = [_CENTER | {"overhead_s": overhead_s, "latency_s": latency_s} for overhead_s, latency_s in _STARTS]
    fits = [
        least_squares.minimize(times, measured_s, logarithms(_CENTER), spread, logarithms(start)) for start in starts
    ]
    return _with(machine, free, np.exp(min(fits, key=lambda fit: fit.loss).theta).tolist())


def _calibrate_group(group: _Group, number: int) -> tuple[dict[str, Any], list[Cell]]:
    """Measures and fits one group. Returns the parameters and cells of its first process, in all processes."""
    members = {device.process_index for device in group.mesh.devices.flat}
    first = group.mesh.devices.flat[0].process_index == jax.process_index()
    measured: list[tuple[Any, str, Cell]] = []
    done: set[tuple[Any, ...]] = set()
    for round_ in range(2):  # better parameters select other chunks and algorithms
        key = f"calibrate/{number}/{group.scope}/{round_}"
        if jax.process_index() in members:
            measured += _measure(group, key, done)
        text = ""
        if first:
            fitted = _fit(group.machine(), group.scope, measured)
            cells = [
                dataclasses.replace(cell, predicted_s=plan.cost(request, algorithm, 4, fitted).time_s)
                for request, algorithm, cell in measured
            ]
            found = {"links": fitted.links, "launch_s": fitted.launch_s}
            text = kv_store.kv_agree(key, json.dumps([found, [dataclasses.astuple(cell) for cell in cells]]))
        found, rows = json.loads(text or kv_store.kv_wait(key, _LIMIT_S))
        _cost_params.apply({group.scope: found})
    return found, [Cell(*row) for row in rows]


def calibrate(keep: bool = True) -> Calibration:
    """Measures collectives on this machine and fits the cost model to the times. All processes must call it.

    This takes about ten seconds for each scope of the program (one process, several processes of a node, several
    nodes). Programs that are compiled afterwards use the new parameters. If the parameters are saved, later programs on
    this machine use them too. The first process of each node writes the file. If the processes of a later program find
    different files, all use the file of the process that reads its file first.

    Args:
      keep: save the parameters in JAXCOMM_CALIBRATION, by default jaxcomm/calibration-<host>.json in the user's cache
        folder. If that fails, a warning says so.

    Returns:
      Measured and predicted times; print it.

    Raises:
      RuntimeError: a process did not connect within JAXCOMM_TIMEOUT_S, or the measurement failed in another
        process. The latter is detected after ten minutes.
    """
    number = next(_numbers)
    writers = [processes[0] for processes in placement.nodes()] if keep else []
    _cost_params.load()
    found, cells = {}, []
    for group in _groups():
        found[group.scope], more = _calibrate_group(group, number)
        cells += more
    path = _cost_params.path() if keep and found else None
    try:
        if path is not None and jax.process_index() in writers:
            _cost_params.save(found)
    except OSError as error:
        warnings.warn(f"jaxcomm.calibrate: the parameters were not saved in {path}: {error}", stacklevel=2)
        path = None
    return Calibration(tuple(cells), path)
