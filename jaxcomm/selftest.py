"""``python -m jaxcomm.selftest``: compares every collective with jax.lax on the devices of this program.

Runs alone, under ``python -m jaxcomm.run``, and under any launcher of ``jaxcomm.distributed.initialize``. Prints
bandwidths in the columns of nccl-tests and the result.

Exit status: 0 if all results are right, 1 if one is wrong or raised, 3 if time ran out between two tests, 124 if a test
did not end, 2 for wrong arguments.
"""

import argparse
import dataclasses
import faulthandler
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import statistics
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
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _config, _lowering, _selftest_record
from jaxcomm._measure import collectives, size_text, timing
from jaxcomm._measure.collectives import COLLECTIVES, Collective, Group
from jaxcomm._processes import kv_store

PASSED, FAILED, INCOMPLETE, TIMED_OUT = 0, 1, 3, 124
_AXIS = "i"
_SIZES = {"cpu": (1 << 10, 64 << 10, 1 << 20), "gpu": (1 << 10, 64 << 10, 1 << 20, 32 << 20)}
_DTYPES = ("float32", "bfloat16", "int32")  # types after the first are tested with one size
_TYPED_BYTES = 64 << 10
_REDOPS = {"psum": "sum", "pmean": "avg", "pmax": "max", "pmin": "min", "psum_scatter": "sum"}
_SHARE = 0.8  # of the time limit: after it, no test begins


def _like(name: str, of: str) -> Collective:
    return dataclasses.replace(
        COLLECTIVES[of], name=name, run=lambda lib, x, axis, n, options: getattr(lib, name)(x, axis, **options)
    )


OPS = {**COLLECTIVES, "pmean": _like("pmean", "psum"), "pmin": _like("pmin", "pmax")}


class _Lax:
    """jax.lax, with the operations that it lacks on some platforms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    @staticmethod
    def pbroadcast(x: Any, axis_name: Any, source: int) -> Any:
        return lax.all_gather(x, axis_name)[source]

    @staticmethod
    def barrier(x: Any, axis_name: Any) -> Any:
        return x


@dataclasses.dataclass
class Row:
    """One test. The columns of nccl-tests: time of one call, bandwidths in GB/s of 1e9 bytes, wrong elements."""

    op: str
    size: int
    count: int
    type: str
    redop: str
    time_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None
    error: str = ""

    @property
    def right(self) -> bool:
        return self.wrong == 0 and not self.error

    def __str__(self) -> str:
        times = [f"{value:.2f}" if value is not None else "-" for value in (self.time_us, self.algbw, self.busbw)]
        wrong = "-" if self.wrong is None else str(self.wrong)
        line = f"{self.op:14}{self.size:>11}{self.count:>11}{self.type:>10}{self.redop:>7}"
        return line + f"{times[0]:>12}{times[1]:>9}{times[2]:>9}{wrong:>9}" + (f"  {self.error}" if self.error else "")


HEADER = (
    f"#{'op':13}{'size':>11}{'count':>11}{'type':>10}{'redop':>7}{'time':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>9}\n"
    f"#{'':13}{'(B)':>11}{'(elements)':>11}{'':>10}{'':>7}{'(us)':>12}{'(GB/s)':>9}{'(GB/s)':>9}{'':>9}"
)


@jax.jit
def _count_wrong(ours: jax.Array, theirs: jax.Array | float) -> jax.Array:
    return jnp.sum(ours != theirs, dtype=jnp.int32)


def _test_op(row: Row, collective: Collective, group: Group, size: collectives.Size) -> None:
    n, dtype = group.size, jnp.dtype(row.type)
    x = collectives.place(collectives.make_operands(collective, size, dtype, n, 1), group)
    ours = collectives.program(collective, jaxcomm, group, 1, {})
    y = ours(x)
    row.wrong = int(_count_wrong(y, collectives.program(collective, _Lax(), group, 1, {})(x)))
    measure_us = timing.stopwatch(ours, x)
    row.time_us = statistics.median(measure_us() for _ in range(20 if row.size <= _TYPED_BYTES else 5))
    if collective.bus_factor is not None:
        row.algbw = row.size / row.time_us / 1e3
        row.busbw = row.algbw * collective.bus_factor(n)


def _in_loop(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """Several collectives per step of a loop, one of them XLA's own."""

    def step(x: Any, _: Any) -> tuple[Any, None]:
        y = lib.psum_scatter(x, axes, tiled=True) - lib.pmax(x[:8], axes)[0]
        return lib.all_gather(y, axes, tiled=True) + lax.psum(x[0], axes) % 7, None

    return lax.scan(step, x % 3, length=3)[0] % 251


def _gradient(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    return jax.grad(lambda x: jnp.sum(lib.all_to_all(lib.psum(x, axes[0]), axes, 0, 0, tiled=True) * x))(x)


def _ragged(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """Slices of two sizes. jax.lax sends the largest size, because XLA lacks ragged_all_to_all on CPUs."""
    n = lax.axis_size(axes)
    rank, peers, rows = lax.axis_index(axes), jnp.arange(n), x.shape[0] // n
    sizes = rows - (rank + peers) % 2  # of both directions
    if lib is not jaxcomm:
        y = lax.all_to_all(x, axes, 0, 0, tiled=True)
        return jnp.where(jnp.arange(x.shape[0]) % rows < jnp.repeat(sizes, rows), y, 0)
    places = jnp.full(n, rank * rows)
    return jaxcomm.ragged_all_to_all(x, jnp.zeros_like(x), peers * rows, sizes, places, sizes, axis_name=axes)


def _ragged_to_fewer(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """One row of every slice, to an output of fewer rows than the operand: GPUs then put instead of reading."""
    n = lax.axis_size(axes)
    rank, peers, rows = lax.axis_index(axes), jnp.arange(n), x.shape[0] // n
    if lib is not jaxcomm:
        return lax.all_to_all(x[::rows], axes, 0, 0, tiled=True)
    ones = jnp.ones_like(peers)
    return jaxcomm.ragged_all_to_all(
        x, jnp.zeros(n, x.dtype), peers * rows, ones, jnp.full(n, rank), ones, axis_name=axes
    )


def _start(lib: Any, name: str, x: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Starts a collective. The function that it returns ends it. jax.lax has no started collectives."""
    if lib is jaxcomm:
        done: Callable[..., Any] = getattr(jaxcomm, f"{name}_start")(x, *arguments, **options).done
        return done
    y = getattr(lib, name)(x, *arguments, **options)
    return lambda after: y


def _starts(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """All started collectives, and a synchronous one beside them."""
    size = lax.axis_size(axes[0])
    started = [
        _start(lib, "psum", x, axes),
        _start(lib, "all_gather", x, axes, tiled=True),
        _start(lib, "psum_scatter", x, axes, tiled=True),
        _start(lib, "all_to_all", x, axes, 0, 0, tiled=True),
        _start(lib, "ppermute", x, axes[0], [(rank, (rank + 1) % size) for rank in range(size)]),
        _start(lib, "pbroadcast", x, axes[0], 0),
    ]
    y = lib.pmax(x, axes)
    return jnp.concatenate([y, *(done(after=y) for done in started)])


def _starts_in_loop(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    def step(x: Any, _: Any) -> tuple[Any, None]:
        done = _start(lib, "psum", x, axes)
        y = lib.all_gather(x[: x.shape[0] // lax.axis_size(axes)] * 2, axes, tiled=True)
        return (done(after=y) + y) % 251, None

    return lax.scan(step, x, length=3)[0]


# Collectives in programs: (lib, x, names of two axes) -> y.
PROGRAMS: dict[str, Callable[[Any, Any, tuple[str, str]], Any]] = {
    "two axes": lambda lib, x, axes: lib.all_to_all(lib.psum(x, axes[1]), axes, 0, 0, tiled=True),
    "one axis": lambda lib, x, axes: lib.all_gather(lib.pmin(x, axes[0]), axes[1]).sum(0),
    "loop": _in_loop,
    "gradient": _gradient,
    "ragged_all_to_all": _ragged,
    "ragged to fewer": _ragged_to_fewer,
    "start and done": _starts,
    "starts in loop": _starts_in_loop,
}


def _experts(lib: Any, x: Any, axes: tuple[str, str], width: int = 8, reduce: str = "node") -> Any:
    """A layer of experts between nodes, and its gradient. The experts of rank r multiply rows by r + 1.

    In bfloat16, by one of three factors: all results are whole numbers below 256.
    """
    n, rank, choices = lax.axis_size(axes), lax.axis_index(axes), 3
    x = x.reshape(-1, 8)
    small = x.dtype == jnp.bfloat16
    factors = 3 if small else n
    tokens = jnp.tile(x % 5 if small else x, (1, width // 8))
    places = jnp.arange(len(tokens))[:, None] * 5 + jnp.arange(choices) * 3 + rank  # experts, before the remainder
    weights = (places % 4).astype(x.dtype)
    if lib is not jaxcomm:
        scales = weights * (places % (2 * n) // 2 % factors + 1).astype(x.dtype)
        return 3 * tokens * scales.sum(1, keepdims=True)
    capacity = 2 * choices * len(tokens)  # each expert gets at most one row of a choice from the n ranks

    def layer(tokens: Any) -> Any:
        routing = jaxcomm.moe.route(
            places % (2 * n), axes, num_experts=2 * n, capacity=capacity, on_overflow="drop", reduce=reduce
        )
        rows = jaxcomm.moe.dispatch(tokens, routing, algorithm=_BETWEEN_NODES)
        rows = rows * (rank % factors + 1).astype(x.dtype)
        return jaxcomm.moe.combine(rows, routing, weights, algorithm=_BETWEEN_NODES)

    return layer(tokens) + jax.grad(lambda tokens: jnp.sum(layer(tokens) * tokens))(tokens)


def _sum_by_node(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """256 + 1 + 1 in bfloat16; the last row comes from the last rank, the others from the first one.

    258 in one node. Between nodes, the sum of the first node is rounded to 256, and so is 256 + 1.
    """
    n = lax.axis_size(axes)
    ids = jnp.tile(jnp.array([0, 1, 2 * n - 1]), (x.size // 8, 1))
    routing = jaxcomm.moe.route(ids, axes, num_experts=2 * n, on_overflow="drop")
    rows = jaxcomm.moe.dispatch(jnp.ones_like(x).reshape(-1, 8), routing, algorithm=_BETWEEN_NODES)
    weights = jnp.tile(jnp.array([256, 1, 1], x.dtype), (len(ids), 1))
    return jaxcomm.moe.combine(rows, routing, weights, algorithm=_BETWEEN_NODES)


_MOE = "moe"
_BETWEEN_NODES = "hierarchical"
_NO_GIN = "there is no GIN between them"  # in the error of such a group: ffi/cuda/runtime/communicator.cc
_WIDE = {"cpu": (8, 64), "gpu": (1024, 4096)}  # tokens of a rank, elements of a row: enough for all thread blocks


class _NotBetweenNodes(Exception):
    """dispatch and combine can't be tested between nodes here."""


def _run_program(lib: Any, run: Callable[..., Any], row: Row, devices: Sequence[Any], count: int) -> jax.Array:
    n = len(devices)
    inner = next(size for size in range(int(n**0.5), 0, -1) if n % size == 0)
    mesh = Mesh(np.array(devices).reshape(inner, n // inner), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    group = Group(mesh, ("a", "b"))
    x = collectives.place((np.arange(n * count).reshape(n, -1) % 61).astype(jnp.dtype(row.type)), group)
    spec = P(("a", "b"))
    body = jax.shard_map(
        lambda x: run(lib, x, ("a", "b")).reshape(-1), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(body)(x)  # type: ignore[no-any-return]


def _test_program(row: Row, run: Callable[..., Any], devices: Sequence[Any], count: int | None = None) -> None:
    """`count`: elements per device that the program gets, if it makes more of them."""
    count = count or row.count
    row.wrong = int(_count_wrong(*(_run_program(lib, run, row, devices, count) for lib in (jaxcomm, _Lax()))))


def _find_nodes(row: Row, devices: Sequence[Any]) -> None:
    """Raises _NotBetweenNodes if the kernels have found one node: "hierarchical" is then "direct"."""
    sums = _run_program(jaxcomm, _sum_by_node, row, devices, row.count)
    if int(_count_wrong(sums, 258)) == 0:
        raise _NotBetweenNodes("NVLink connects all GPUs: dispatch and combine were not tested between nodes")
    row.wrong = int(_count_wrong(sums, 256))


def _tests_between_nodes(devices: Sequence[Any]) -> Iterator[tuple[Row, Callable[[], None]]]:
    """As tests(), for dispatch and combine between nodes."""
    n = len(devices)
    row = Row(_MOE, 32 * n * 2, 32 * n, "bfloat16", "sum")
    yield row, functools.partial(_find_nodes, row, devices)
    row = Row(_MOE, 32 * n * 4, 32 * n, "float32", "sum")
    yield row, functools.partial(_test_program, row, _experts, devices)
    tokens, width = _WIDE[devices[0].platform]
    for reduce in ("node", "home"):
        row = Row(_MOE, tokens * width * 2, tokens * width, "bfloat16", "sum")
        run = functools.partial(_experts, width=width, reduce=reduce)
        yield row, functools.partial(_test_program, row, run, devices, tokens * 8)


def tests(devices: Sequence[Any], sizes: Sequence[int], ops: Sequence[str]) -> Iterator[tuple[Row, Callable[[], None]]]:
    """The rows, not yet filled, and the functions that fill them. The same in all processes."""
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    group, n = Group(mesh, _AXIS), len(devices)
    cells = [(size, _DTYPES[0]) for size in sizes] + [(min(_TYPED_BYTES, max(sizes)), dtype) for dtype in _DTYPES[1:]]
    for name in ops:
        collective = OPS[name]
        for size_bytes, dtype in cells if collective.sized else cells[:1]:
            if (name == "pmean" and dtype == "int32") or collectives.num_values(collective, dtype, n, 1) < 2:
                continue  # integers have no mean here, and sums over so many ranks are not exact in some types
            itemsize = jnp.dtype(dtype).itemsize
            size = collectives.make_size(collective, size_bytes, itemsize, n)
            row = Row(name, size.total * itemsize, size.count, dtype, _REDOPS.get(name, "none"))
            yield row, functools.partial(_test_op, row, collective, group, size)
    for name, run in PROGRAMS.items():
        row = Row(name, 32 * n * 4, 32 * n, "float32" if name == "gradient" else "int32", "none")
        yield row, functools.partial(_test_program, row, run, devices)


class Report:
    """The lines that are printed and the record that is written. Only process 0 prints and writes the file."""

    def __init__(self, file: pathlib.Path | None, limit_s: float):
        self.file, self.limit_s, self.begin = file, limit_s, time.monotonic()
        self.rows: list[Row] = []
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
        """Prints the result and writes the file."""
        self.say(f"# {result}")
        if self.prints and self.file is not None:
            rows = [dataclasses.asdict(row) for row in self.rows]
            found = {
                "result": result,
                "status": status,
                "seconds": round(self.seconds, 3),
                **self.facts,
                "rows": rows,
            }
            self.file.write_text(json.dumps(found, indent=1) + "\n")
        return status

    def revoke(self, wrong: Sequence[Row]) -> None:
        """Takes an earlier success out of the record. One inside nodes stays if only tests between nodes failed."""
        if self.key is None:
            return
        try:
            _selftest_record.revoke(self.key, only_between_nodes=all(row.op == _MOE for row in wrong))
        except OSError as error:
            self.say(f"# an earlier success is still recorded: {error}")

    def time_out(self) -> None:
        """Ends the process: a collective that does not end can't be interrupted."""
        faulthandler.dump_traceback(all_threads=True)
        name: Any = self.current
        if isinstance(name, Row):
            self.revoke([name])
            name = f"{name.op} of {name.size} bytes"
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
    own = report.seconds < _SHARE * report.limit_s
    return kv_store.kv_agree(f"selftest/{number}", str(int(own))) == "1"


def run(report: Report, devices: Sequence[Any], sizes: Sequence[int], ops: Sequence[str]) -> int:
    """Runs the tests and prints them. Returns the exit status."""
    report.facts = _facts(devices)
    report.say(
        f"# jaxcomm {report.facts['jaxcomm']}, jaxlib {report.facts['jaxlib']}: {len(devices)} devices "
        f"({devices[0].device_kind}) in {jax.process_count()} processes"
    )
    report.say(HEADER)
    key = report.key = _selftest_record.key() if devices[0].platform == "gpu" else None
    # All processes decide as the first of them does.
    several = kv_store.kv_agree("selftest/moe", str(int(key is not None and key["hosts"] == "several"))) == "1"
    last = _tests_between_nodes(devices) if several else iter(())
    between_nodes = several  # until a test shows that they cannot be tested
    no_gin = False
    for number, (row, fill) in enumerate(itertools.chain(tests(devices, sizes, ops), last)):
        if not _goes_on(report, number):
            return report.end(INCOMPLETE, f"INCOMPLETE: {len(report.rows)} tests passed before the time ran out")
        report.current = row
        try:
            fill()
        except Exception as error:  # the result names it
            if isinstance(error, _NotBetweenNodes):
                report.say(f"# {error}")
                between_nodes = False
                break  # of the last tests
            if several and _NO_GIN in str(error):  # all tests use all GPUs
                no_gin = True
                break
            lines = str(error).splitlines()
            row.error = f"{type(error).__name__}: {lines[0] if lines else ''}"
        report.rows.append(row)
        report.say(str(row))
        if row.error and jax.process_count() > 1:
            break  # this process would run other tests than the others
    wrong = [row for row in report.rows if not row.right]
    if wrong:
        report.revoke(wrong)
        names = ", ".join(dict.fromkeys(row.op for row in wrong))
        return report.end(FAILED, f"FAILED: {len(wrong)} of {len(report.rows)} tests, in {names}")
    if no_gin:
        report.revoke([])
        return report.end(
            PASSED, "PASSED: no plans between nodes, where XLA's own collectives run without GIN; not recorded"
        )
    return _passed(report, devices, key, set(ops) == set(OPS), between_nodes)


def _passed(
    report: Report, devices: Sequence[Any], key: dict[str, str] | None, complete: bool, between_nodes: bool
) -> int:
    result = f"PASSED: {len(report.rows)} tests on {len(devices)} devices in {report.seconds:.0f} s"
    if len(devices) == 1:
        return report.end(PASSED, f"{result}; with one device, nothing was communicated")
    if key is None:
        return report.end(PASSED, result)
    if not complete:
        return report.end(PASSED, f"{result}; not recorded, because only some ops were tested")
    try:
        file = _selftest_record.save(key, between_nodes)
    except OSError as error:
        return report.end(PASSED, f"{result}; not recorded: {error}")
    report.facts["recorded"] = str(file) if file else None
    return report.end(PASSED, f"{result}; recorded in {file}" if file else f"{result}; there is no cache folder")


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.selftest", description=__doc__.split("\n\n")[1])
    parser.add_argument("--json", type=pathlib.Path, help="write the result to this file")
    parser.add_argument("--sizes", type=size_text.parse_list, help="bytes, such as 1K,1M")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS), help="only these ops")
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
            return report.end(PASSED, f"PASSED: nothing to test: {why}")
        return run(report, devices, args.sizes or _SIZES[devices[0].platform], args.ops)
    finally:
        timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
