"""The sweep over ops, sizes and modes, which measures all libraries in turn."""

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxcomm
from jaxcomm._measure import collectives, timing
from jaxcomm._measure.collectives import COLLECTIVES, Collective, Group
from jaxcomm._measure.process_group import ProcessGroup
from jaxcomm.bench import report
from jaxcomm.bench.records import Record

OURS, LAX = "ours", "lax"  # between processes, jax.lax runs on gloo


def sizes(begin: int, end: int, factor: int) -> list[int]:
    count = max(math.floor(math.log(end / begin, factor) + 1e-9), 0) + 1
    return [begin * factor**i for i in range(count)]


class Cell:
    """One op, size and mode: its programs, compiled and checked, and their measurement.

    A side is a library: OURS or LAX.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        processes: ProcessGroup,
        group: Group,
        collective: Collective,
        size_bytes: int,
        mode: str,
    ):
        n, dtype = group.size, jnp.dtype(args.dtype)
        self.args, self.processes, self.group, self.collective, self.mode = args, processes, group, collective, mode
        self.size = collectives.make_size(collective, size_bytes, dtype.itemsize, n)
        self.size_bytes = self.size.total * dtype.itemsize
        self.chain = 1 if mode == "call" else collectives.longest_exact_chain(collective, dtype, n, args.chain)
        self.wrong = {OURS: 0, LAX: 0}
        self.xs = collectives.make_operands(collective, self.size, dtype, n, self.chain)
        self.x = collectives.place(self.xs, group)
        self.expected = collective.expect(self.xs, self.chain)
        self.algorithm = args.algorithm or self._selected()
        self.programs = self._programs(self.chain)
        self.check(self.programs, self.expected)
        if self.chain > 1:
            # Some chains return their operand, so a program without communication would pass: check one op as well.
            self.check(self._programs(1), collective.expect(self.xs, 1))

    def _selected(self) -> str:
        if self.processes.size > 1:
            return "selected"  # only groups of one process are explained here
        operand = jax.ShapeDtypeStruct((self.size.operand,), self.args.dtype)
        return jaxcomm.explain(self.collective.name, operand, self.args.axes).algorithm

    def _programs(self, chain: int) -> dict[str, Callable]:
        options = {} if self.args.algorithm is None else {"algorithm": self.args.algorithm}
        libraries = {OURS: (jaxcomm, options)}
        if self.collective.baseline is not None:
            libraries[LAX] = (lax, {})
        return {
            side: collectives.program(self.collective, library, self.group, chain, keywords, self.args.isolate)
            for side, (library, keywords) in libraries.items()
        }

    def check(self, programs: dict[str, Callable], expected: Any) -> None:
        wrong = {side: collectives.count_wrong(function(self.x), expected) for side, function in programs.items()}
        for of_process in self.processes.gather(wrong):
            for side, count in of_process.items():
                self.wrong[side] += count

    def run(self) -> dict[str, timing.Times]:
        """Times per op of all sides and, in one process, of the copy limit. Checks the data again."""
        sides = {side: timing.stopwatch(function, self.x) for side, function in self.programs.items()}
        with contextlib.ExitStack() as stack:
            if self.size_bytes and self.processes.size == 1:
                limit = timing.CopyLimit(self.group.size, self.size_bytes, fresh=self.mode == "call")
                sides[timing.LIMIT] = stack.enter_context(limit).measure_us
            times = timing.alternate(
                sides,
                reps=self.args.reps,
                size_bytes=self.size_bytes,
                max_seconds=self.args.max_seconds,
                processes=self.processes,
            )
        self.check(self.programs, self.expected)
        return {side: t if side == timing.LIMIT else t.per_op(self.chain) for side, t in times.items()}

    def record(self, times: dict[str, timing.Times]) -> Record:
        medians_us = {side: t.median_us for side, t in times.items()}
        p99s_us = {side: t.p99_us for side, t in times.items()}
        factor = self.collective.bus_factor
        algbw = self.size_bytes / medians_us[OURS] / 1e3 if OURS in times and factor else None
        return Record(
            op=self.collective.name,
            mode=self.mode,
            size_bytes=self.size_bytes,
            count=self.size.count,
            dtype=self.args.dtype,
            ranks=self.group.size,
            processes=self.processes.size,
            algorithm=self.algorithm,
            chain=self.chain,
            reps=len(times[OURS].us) if OURS in times else 0,
            time_us=medians_us.get(OURS),
            p99_us=p99s_us.get(OURS),
            algbw_gb_per_s=algbw,
            busbw_gb_per_s=factor(self.group.size) * algbw if factor and algbw else None,
            wrong=self.wrong[OURS],
            baseline=collectives.baseline_name(self.collective) if self.processes.size == 1 else "gloo",
            baseline_time_us=medians_us.get(LAX),
            baseline_p99_us=p99s_us.get(LAX),
            baseline_wrong=self.wrong[LAX],
            limit_us=medians_us.get(timing.LIMIT),
        )


def sweep(
    args: argparse.Namespace,
    processes: ProcessGroup,
    group: Group,
    run: dict[str, Any],
    results: list[Record],
    save: Callable[[], None] | None,
) -> None:
    """Measures all cells and appends to `results`. All processes must call it; rank 0 prints and saves."""
    modes = ("call", "chain") if args.mode == "both" else (args.mode,)
    cells = [
        (COLLECTIVES[op], size, mode)
        for op in args.op
        for mode in modes
        for size in (sizes(args.begin, args.end, args.factor) if COLLECTIVES[op].sized else [0])
    ]

    def show(text: str) -> None:
        if processes.rank == 0:
            print(text, flush=True)

    show(report.header(run, group.size, processes.size))
    for collective, size_bytes, mode in cells:
        cell = Cell(args, processes, group, collective, size_bytes, mode)
        result = cell.record({} if args.check_only else cell.run())
        results.append(result)
        if mode == "chain" and cell.chain < args.chain:
            show(f"# {collective.name}: longer chains than {cell.chain} are not exact in {args.dtype}")
        show(report.line(result))
        if save and processes.rank == 0:
            save()  # after every cell, so that an interruption loses little
        del cell
