"""``python -m jaxcomm.selftest``: compares every collective with jax.lax on the devices of this program.

Runs alone, under ``python -m jaxcomm.run``, and under any launcher of ``jaxcomm.distributed.initialize``. On GPUs, it
records what gave right values and what was faster than XLA's collective: jaxcomm's kernels run only that by default. A
run that ended early continues where it stopped.

Exit status: 0 if all results are right, 1 if one is wrong or raised, 2 for wrong arguments, 3 if time ran out between
two tests, 4 if nothing could be tested, 124 if a test did not end.
"""

import argparse
import dataclasses
import faulthandler
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

import jaxcomm
from jaxcomm import _config, _lowering, _request, _selftest_record
from jaxcomm._core import plan
from jaxcomm._measure import collectives, size_text, timing
from jaxcomm._measure.collectives import COLLECTIVES, Collective, Group
from jaxcomm._measure.process_group import ProcessGroup
from jaxcomm._processes import kv_store
from jaxcomm._selftest_programs import (
    ALL_PROGRAMS,
    BETWEEN_NODES,
    CHOICES,
    STAGED_BYTES,
    STAGING,
    Lax,
    by_feature,
    experts,
    one_exchange,
    ragged,
    sum_by_node,
)
from jaxcomm._selftest_record import EXPERTS, GRAPHS, ONE_EXCHANGE, PLANS, SLICES, SUMS_BY_NODE, TYPES, Row
from jaxcomm.info._capabilities import find_cuda

PASSED, FAILED, INCOMPLETE, NOTHING, TIMED_OUT = 0, 1, 3, 4, 124
_SIZES = {"cpu": (1, 64 << 10, 1 << 20), "gpu": (1, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)}
_DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "bfloat16",
    "float16", "float32", "complex64",
)  # fmt: skip
_WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")  # with jax_enable_x64
_TYPES_BYTES = 4 << 10
# Up to this size, chains of calls are timed: one call takes less time than its start from Python.
_SHORT_BYTES = 1 << 20
_CHAIN = 8
_SHARE = 0.8  # of the time limit: after it, no test begins


def _like(name: str, of: str) -> Collective:
    return dataclasses.replace(
        COLLECTIVES[of], name=name, run=lambda lib, x, axis, n, options: getattr(lib, name)(x, axis, **options)
    )


# A mean is tested with equal operands, because other means are rounded.
_MEAN = dataclasses.replace(_like("pmean", "psum"), expect=lambda xs, k: xs)
OPS = {
    **COLLECTIVES,
    "pmean": _MEAN,
    "pmin": dataclasses.replace(_like("pmin", "pmax"), expect=lambda xs, k: np.broadcast_to(xs.min(axis=0), xs.shape)),
}
_TIMED = {name: op for name, op in COLLECTIVES.items() if _request.ROWS[op.native].functions[0] == name}


@jax.jit
def _count_wrong(ours: Any, theirs: Any) -> jax.Array:
    """Elements that differ, of the ranks of all processes. Both are arrays or lists of them."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.sum(x != y, dtype=jnp.int32), ours, theirs))


def _put(xs: np.ndarray, group: Group) -> jax.Array:
    """Places blocks of a group's ranks, (ranks, elements), in all groups of the mesh."""
    return collectives.place(np.tile(xs, (group.mesh.size // group.size, 1)), group)


def _time(row: Row, ours: Callable[..., Any], theirs: Callable[..., Any], x: jax.Array, chain: int = 1) -> None:
    """Times both sides in turn. All processes measure the same number of repetitions."""
    sides = {"ours": timing.stopwatch(ours, x), "theirs": timing.stopwatch(theirs, x)}
    times = timing.alternate(
        sides, reps=15 if chain > 1 else 7, size_bytes=row.bytes, max_seconds=None, processes=ProcessGroup()
    )
    row.jaxcomm_us, row.xla_us = (times[side].median_us / chain for side in sides)


def _test_op(row: Row, collective: Collective, group: Group, size: collectives.Size) -> None:
    n, dtype = group.size, jnp.dtype(row.dtype)
    chain = collectives.longest_exact_chain(collective, dtype, n, _CHAIN if row.bytes <= _SHORT_BYTES else 1)
    x = _put(collectives.make_operands(collective, size, dtype, n, chain), group)
    ours = collectives.program(collective, jaxcomm, group, chain, {}, isolate=True)
    lib, options = (lax, {}) if collective.baseline == "" else (jaxcomm, {"algorithm": "xla"})
    theirs = collectives.program(collective, lib, group, chain, options, isolate=True)
    row.wrong = int(_count_wrong(ours(x), theirs(x)))
    _time(row, ours, theirs, x, chain)


def _dtypes(collective: Collective, n: int) -> list[str]:
    """The element types that the collective takes, and in which its results over n ranks are exact."""
    found = []
    for name in (*_DTYPES, *(_WIDE_DTYPES if jax.config.read("jax_enable_x64") else ())):
        dtype = jnp.dtype(name)
        floating = jnp.issubdtype(dtype, jnp.floating)
        complex_sum = dtype.kind == "c" and collective.name in ("psum", "psum_scatter")
        ordered = floating or jnp.issubdtype(dtype, jnp.integer)
        fits = not _request.ROWS[collective.native].reduces or complex_sum or ordered
        if collective.name == "pmean":
            fits = floating
        if fits and collectives.num_values(collective, dtype, n, 1) >= 2:
            found.append(name)
    return found


def _test_types(row: Row, collective: Collective, group: Group) -> None:
    """All element types in one program, compared with NumPy."""
    operands, expected = [], []
    for name in row.dtype.split(","):
        size = collectives.make_size(collective, _TYPES_BYTES, jnp.dtype(name).itemsize, group.size)
        xs = collectives.make_operands(collective, size, jnp.dtype(name), group.size, 1)
        if collective.name == "pmean":
            xs = np.tile(xs[:1], (len(xs), 1))
        operands.append(_put(xs, group))
        expected.append(_put(np.stack(collective.expect(xs, 1)), group))

    def body(*xs: Any) -> Any:
        return [collective.run(jaxcomm, x, group.axis, group.size, {}) for x in xs]

    row.wrong = int(_count_wrong(_mapped(body, group)(*operands), expected))


def _timed_dtypes(collective: Collective, platform: str) -> tuple[str, ...]:
    """Sums have code for each type. Other collectives move bytes."""
    sums = platform == "gpu" and _request.ROWS[collective.native].reduces
    return ("float32", "bfloat16") if sums else ("float32",)


def _mapped(body: Callable[..., Any], group: Group, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=group.spec, out_specs=group.spec, check_vma=False)
    return jax.jit(mapped, compiler_options=options)


# In the error of a call without NVLink SHARP: ffi/cuda/runtime/device_call.cc.
_NO_SWITCH = 'algorithm "multimem" needs NVLink SHARP'
_NO_GIN = "there is no GIN between them"  # in the error of such a group: ffi/cuda/runtime/communicator.cc
_WIDE = {"cpu": (8, 64), "gpu": (1024, 4096)}  # tokens of a rank, elements of a row: enough for all thread blocks


class _NotBetweenNodes(Exception):
    """dispatch and combine can't be tested between nodes here."""


def _two_axes(group: Group) -> Group:
    """The same groups with two axes."""
    n = group.size
    inner = next(size for size in range(int(n**0.5), 0, -1) if n % size == 0)
    mesh = Mesh(
        group.mesh.devices.reshape(-1, inner, n // inner), ("groups", "a", "b"), axis_types=(AxisType.Auto,) * 3
    )
    return Group(mesh, ("a", "b"))


def _prepare(
    lib: Any, run: Callable[..., Any], row: Row, group: Group, count: int, options: dict[str, Any] | None = None
) -> tuple[Callable[..., Any], jax.Array]:
    """Returns a program and its operand: `count` whole numbers below 61 on each device."""
    shape = (group.mesh.size, count)
    x = collectives.place((np.arange(math.prod(shape)).reshape(shape) % 61).astype(jnp.dtype(row.dtype)), group)
    return _mapped(lambda x: run(lib, x, group.axis).reshape(-1), group, options), x


def _test_program(
    row: Row, run: Callable[..., Any], group: Group, count: int, xla: Callable[..., Any] | None = None, **more: Any
) -> None:
    """`xla`: the program with XLA's collectives, for the times."""
    ours, x = _prepare(jaxcomm, run, row, group, count, **more)
    theirs, _ = _prepare(Lax(), run, row, group, count)
    # Three times: the first execution makes a CUDA graph, and the others replay it.
    row.wrong = sum(int(_count_wrong(ours(y), theirs(y))) for y in ((x, x + 1, x) if row.feature == GRAPHS else (x,)))
    if xla is not None:
        _time(row, ours, _prepare(jaxcomm, xla, row, group, count)[0], x)


def _find_nodes(row: Row, group: Group) -> None:
    """Raises _NotBetweenNodes if the kernels have found one node: "hierarchical" is then "direct"."""
    program, x = _prepare(jaxcomm, sum_by_node, row, group, 32 * group.size)
    sums = program(x)
    if int(_count_wrong(sums, 258)) == 0:
        raise _NotBetweenNodes("NVLink connects all GPUs: dispatch and combine were not tested between nodes")
    row.wrong = int(_count_wrong(sums, 256))


Test = tuple[Row, Callable[[], None]]


def _tests_of_experts(group: Group, per_node: int, platform: str) -> Iterator[Test]:
    """dispatch and combine: layers of experts, of few short rows and of many long ones."""
    n, two = group.size, _two_axes(group)
    between = per_node < n
    if between:
        row = Row(EXPERTS, SUMS_BY_NODE, "bfloat16", 32 * n * 2, n, per_node)
        yield row, functools.partial(_find_nodes, row, two)
    tokens, width = _WIDE[platform]
    cells = [(4 * n, 8, "float32", "node"), *((tokens, width, "bfloat16", reduce) for reduce in ("node", "home"))]
    for count, elements, dtype, reduce in cells:
        run = functools.partial(experts, width=elements, reduce=reduce, algorithm=BETWEEN_NODES if between else None)
        choice_bytes = CHOICES * count * elements * jnp.dtype(dtype).itemsize
        row = Row(EXPERTS, f"experts, {reduce}", dtype, choice_bytes, n, per_node)
        xla = functools.partial(run, algorithm="xla") if platform == "gpu" else None
        yield row, functools.partial(_test_program, row, run, two, count * 8, xla)
    if not between:
        row = Row(ONE_EXCHANGE, ONE_EXCHANGE, "float32", 32 * n * 4, n, per_node)
        xla = functools.partial(one_exchange, two_calls=True) if platform == "gpu" else None
        yield row, functools.partial(_test_program, row, one_exchange, two, 32 * n, xla)


def tests(group: Group, per_node: int, platform: str, sizes: Sequence[int], ops: Sequence[str]) -> Iterator[Test]:
    """The rows, not yet filled, and the functions that fill them. The same in all processes."""
    n = group.size
    two = _two_axes(group)
    for name, (feature, run) in ALL_PROGRAMS.items():
        dtype = "float32" if name == "gradient" else "int32"
        row = Row(feature, name, dtype, 32 * n * 4, n, per_node)
        # XLA then captures even short sequences of calls.
        options = {"xla_gpu_graph_min_graph_size": 1} if feature == GRAPHS else None
        yield row, functools.partial(_test_program, row, run, two, 32 * n, options=options)
    if platform == "gpu":
        for feature in plan.FEATURES if per_node == n else ("steps",):
            count = STAGED_BYTES // 4 // n * n if feature == STAGING else 32 * n
            row = Row(feature, feature, "float32", 4 * count, n, per_node)
            yield row, functools.partial(_test_program, row, functools.partial(by_feature, feature=feature), two, count)
        for count in (32 * n, *(size // 4 // n * n for size in sizes[2:])):
            row = Row(SLICES, "ragged_all_to_all", "float32", 4 * count, n, per_node)
            xla = functools.partial(ragged, algorithm="xla")
            yield row, functools.partial(_test_program, row, ragged, two, count, xla)
    for name in ops:
        if OPS[name].sized:
            dtypes = _dtypes(OPS[name], n)
            row = Row(TYPES, name, ",".join(dtypes), _TYPES_BYTES, n, per_node)
            yield row, functools.partial(_test_types, row, OPS[name], group)
    for size_bytes in sizes:
        for name in ops:
            if not (collective := _TIMED.get(name)) or not (collective.sized or size_bytes == sizes[0]):
                continue
            for dtype in _timed_dtypes(collective, platform):
                item_bytes = jnp.dtype(dtype).itemsize
                size = collectives.make_size(collective, size_bytes, item_bytes, n)
                row = Row(PLANS, name, dtype, size.operand * item_bytes, n, per_node)
                yield row, functools.partial(_test_op, row, collective, group, size)
    yield from _tests_of_experts(group, per_node, platform)


class Report:
    """The lines that are printed and the record that is written. Only process 0 prints and writes the file."""

    def __init__(self, file: pathlib.Path | None, limit_s: float):
        self.file, self.limit_s, self.begin = file, limit_s, time.monotonic()
        self.rows: list[Row] = []  # of this run
        self.known: list[Row] = []  # that earlier runs have recorded
        self.current: Row | str = "the start of JAX"
        self.key: dict[str, str] | None = None  # of the record
        self.facts: dict[str, Any] = {}
        self.prints = True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def say(self, text: str) -> None:
        if self.prints:
            print(text, flush=True)

    def end(self, status: int, result: str) -> int:
        """Prints what runs by default and the result, and writes the file."""
        if self.key is not None:
            fields = ("collective", "num_ranks", "min_bytes", "max_bytes", "algorithm")
            types: dict[tuple[Any, ...], list[str]] = {}
            for found in _selftest_record.ranges([*self.known, *self.rows]):
                types.setdefault(tuple(found[field] for field in fields), []).append(found["dtype"])
            for (name, ranks, begin, end, algorithm), dtypes in types.items():
                sizes = f"operands of {begin:,} to {end:,} bytes" if end < _selftest_record.ANY_SIZE else "all calls"
                by = f" by {algorithm}" if algorithm else ""
                of_types = f" of {', '.join(dtypes)}" if _request.ROWS[name].reduces else ""
                self.say(f"# jaxcomm by default: {name} over {ranks} ranks{by}, {sizes}{of_types}")
            self.say("# All other calls use XLA's collectives by default.")
        self.say(f"# {result}")
        if self.prints and self.file is not None:
            rows = [dataclasses.asdict(row) for row in (*self.known, *self.rows)]
            found = {"result": result, "status": status, "seconds": round(self.seconds, 3), **self.facts, "rows": rows}
            self.file.write_text(json.dumps(found, indent=1) + "\n")
        return status

    def add(self, row: Row) -> None:
        """Prints a row and adds it to the record. It replaces an earlier result of the same test."""
        self.rows = [*(other for other in self.rows if other.test != row.test), row]
        self.say(row.line("" if row.xla_us is None else "jaxcomm" if row.won else "XLA"))
        if self.key is not None:
            try:
                file = _selftest_record.save(self.key, [row])
                self.facts["recorded"] = str(file) if file else None
            except OSError as error:
                self.say(f"# not recorded: {error}")

    def time_out(self) -> None:
        """Ends the process: a collective that does not end can't be interrupted."""
        faulthandler.dump_traceback(all_threads=True)
        name: Any = self.current
        if isinstance(name, Row):
            name.error = "did not end"
            self.add(_selftest_record.first_failure(name) if jax.process_count() > 1 else name)
            name = f"{name.op} of {name.bytes} bytes"
        status = self.end(TIMED_OUT, f"FAILED: {name} did not end within {self.limit_s:g} s")
        sys.stdout.flush()
        os._exit(status)


def _facts(devices: Sequence[Any]) -> dict[str, Any]:
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "jaxcomm": importlib.metadata.version("jaxcomm"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "recorded": None,
    }


def _goes_on(report: Report, number: int) -> bool:
    """Whether another test begins. All processes decide as the first of them does."""
    return kv_store.kv_agree(f"selftest/{number}", str(report.seconds < _SHARE * report.limit_s)) == "True"


def _groups(devices: Sequence[Any], ranks: Sequence[int]) -> list[tuple[Group, int]]:
    """The groups to test: meshes, and the ranks of a group that share a host. Groups inside a host come first.

    `ranks`: sizes of groups; by default all devices, and all devices of a host.
    """
    host = _host_of if devices[0].platform == "gpu" and jax.process_count() > 1 else lambda device: 0
    devices = sorted(devices, key=host)
    on_host = len(devices) // len({host(device) for device in devices})
    found = []
    for size in sorted(set(ranks or (on_host, len(devices))) - ({1} if len(devices) > 1 else set())):
        if len(devices) % size:
            raise ValueError(f"--ranks: {len(devices)} devices cannot be split into groups of {size}")
        mesh = Mesh(np.array(devices).reshape(-1, size), ("groups", "i"), axis_types=(AxisType.Auto,) * 2)
        found.append((Group(mesh, "i"), math.gcd(size, on_host)))
    return found


def _host_of(device: Any) -> int:
    """JAX numbers the hosts of GPUs; a process is a host where it does not."""
    slice_index = getattr(device, "slice_index", None)
    return int(device.process_index if slice_index is None else slice_index)


def _fill(row: Row, fill: Callable[[], None]) -> str:
    """Runs a test. Returns the reason if it cannot be run here."""
    try:
        with _request.resolutions() as calls:
            fill()
        row.ran = ", ".join(dict.fromkeys(found.algorithm for call, found in calls if call.algorithm != "xla"))
        if row.right and row.feature in plan.FEATURES and {found.feature for _, found in calls} != {row.feature}:
            return f"{row.feature} was not tested: with these settings, other kernels run these calls"
    except _NotBetweenNodes as error:
        return str(error)
    except Exception as error:  # the row names it
        text = str(error)
        if _NO_GIN in text and row.ranks_per_node < row.ranks:
            return "there is no GIN between the hosts: jaxcomm's plans cannot run between them"
        if _NO_SWITCH in text:
            return "there is no NVLink SHARP: multimem was not tested"
        if "RESOURCE_EXHAUSTED" in text:
            return f"{row.op} of {row.bytes} bytes was not tested: out of memory"
        lines = text.splitlines()
        row.error = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""


def run(
    report: Report,
    devices: Sequence[Any],
    sizes: Sequence[int],
    ops: Sequence[str],
    ranks: Sequence[int] = (),
    again: bool = False,
) -> int:
    """Runs the tests and prints them. Returns the exit status."""
    platform = devices[0].platform
    report.facts = _facts(devices)
    report.say(
        f"# jaxcomm {report.facts['jaxcomm']}, jaxlib {report.facts['jaxlib']}: {len(devices)} devices "
        f"({devices[0].device_kind}) in {jax.process_count()} processes"
    )
    if platform == "gpu" and len(devices) == 1:
        return report.end(NOTHING, "NOTHING TESTED: one GPU does not communicate")
    if platform == "gpu" and (problem := find_cuda().obstacle):
        return report.end(NOTHING, f"NOTHING TESTED: {problem}")
    report.key = _selftest_record.key() if platform == "gpu" else None
    recorded = _selftest_record.own_rows() if platform == "gpu" and not again else ()
    known = {row.test: row for row in recorded if row.right}
    report.say(_selftest_record.HEADER)
    number, left_out = 0, 0
    for group, per_node in _groups(devices, ranks):
        for row, fill in tests(group, per_node, platform, sizes, ops):
            number += 1
            if row.test in known:
                report.known.append(known[row.test])
                continue
            if not _goes_on(report, number):
                return _end(report, devices, left_out, complete=False)
            report.current = row
            if why := _fill(row, fill):
                left_out += 1
                report.say(f"# {why}")
                if row.ranks_per_node < row.ranks:
                    break  # all tests of this group use its network
                continue
            if row.error and jax.process_count() > 1:  # this process would run other tests than the others
                report.add(_selftest_record.first_failure(row))
                return _end(report, devices, left_out)
            report.add(row)
    return _end(report, devices, left_out)


def _end(report: Report, devices: Sequence[Any], left_out: int, complete: bool = True) -> int:
    if failed := _selftest_record.failure_elsewhere(any(row.error for row in report.rows)):
        report.add(failed)
    wrong = [row for row in report.rows if not row.right]
    if wrong:
        names = ", ".join(dict.fromkeys(row.op for row in wrong))
        return report.end(FAILED, f"FAILED: {len(wrong)} of {len(report.rows)} tests, in {names}")
    if not complete:
        done = f"{len(report.rows)} tests passed before the time ran out; the next run continues here"
        return report.end(INCOMPLETE, f"INCOMPLETE: {done}")
    if not report.rows and not report.known:
        return report.end(NOTHING, "NOTHING TESTED")
    result = f"PASSED: {len(report.rows)} tests on {len(devices)} devices in {report.seconds:.0f} s"
    if report.known:
        result += f"; {len(report.known)} had passed before (--again repeats them)"
    if left_out:
        result += f"; {left_out} could not run here"
    return report.end(PASSED, result)


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.selftest", description=__doc__.split("\n\n")[1])
    parser.add_argument("--json", type=pathlib.Path, help="write the result to this file")
    parser.add_argument("--sizes", type=size_text.parse_list, help="bytes, such as 1K,1M")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS), help="only these ops")
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="sizes of the groups (default: all devices)")
    parser.add_argument("--again", action="store_true", help="repeat tests that have passed before")
    parser.add_argument("--timeout", type=float, default=120, help="seconds (default 120)")
    args = parser.parse_args(arguments)
    report = Report(args.json, args.timeout)
    timer = threading.Timer(args.timeout, report.time_out)
    timer.daemon = True
    timer.start()
    try:
        _config.set_default("JAXCOMM_TIMEOUT_S", f"{args.timeout / 2:g}")  # a lost rank is named before the end
        jaxcomm.distributed.initialize()
        report.prints = jax.process_index() == 0
        if _config.config().algorithm == "xla":
            parser.error("JAXCOMM_ALGORITHM=xla: jaxcomm's own collectives would not run; unset it")
        _lowering.use_plans()
        devices = jax.devices()
        if devices[0].platform not in _SIZES:
            report.facts = _facts(devices)
            why = f"on {devices[0].platform}, jaxcomm uses XLA's own collectives"
            return report.end(NOTHING, f"NOTHING TESTED: {why}")
        try:
            _groups(devices, args.ranks)
        except ValueError as error:
            parser.error(str(error))
        return run(report, devices, args.sizes or _SIZES[devices[0].platform], args.ops, args.ranks, args.again)
    finally:
        timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
