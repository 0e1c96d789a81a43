"""Writes docs/development/gpu-status.md: what each level of tests shows of each feature of the GPU back end.

Level 1 needs no record: the page says how the tests of a feature run without a GPU, and continuous integration fails if
one of them fails. Levels 2 and 3 show records in benchmarks/results/gpu: one file per command of on_gpu.py
(`make gpu-smoke` and so on), and one per rung of bring_up.py. tests/cuda/test_status.py fails if the page is not
that of the records.
"""

import json
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from on_gpu import COMMANDS

ROOT = pathlib.Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "development" / "gpu-status.md"


class Feature(NamedTuple):
    """One row."""

    name: str
    how: str = ""  # its tests run without a GPU; "emulated" if they run the source of the kernels themselves
    tests: tuple[str, ...] = ()  # these tests: "executor" is test_cuda_executor, "build.py" is test_build.py
    parts: tuple[str, ...] = ()  # of the commands of on_gpu.py: level 2
    rungs: tuple[str, ...] = ()  # of bring_up.py: level 3

    @classmethod
    def read(cls, line: str) -> "Feature":
        name, how, tests, parts, rungs = map(str.strip, f"{line}||||".split("|")[:5])
        return cls(name, how, tuple(tests.split()), tuple(filter(None, parts.split("; "))), tuple(rungs.split()))


# Lines that begin with spaces continue a row.
TABLE = """\
kernels compile for sm_80, 90, 100, 120 without register spills | compiled | build.py
executor: all plans, element types and sizes, on one node and on several | emulated | executor
  | executor; executor, memcheck; executor, racecheck; executor, synccheck
staging ring: large calls pass through slots of the arena, in all layouts
  | emulated; a model of the protocol in all executions | executor litmus call | executor
bulk copies (TMA) in place of loads and stores: JAXCOMM_BULK_COPY=1
  | emulated; a model of the protocol in all executions | bulk_copies litmus_rows executor slices | executor
executor kernel as shipped: one stream per rank, buffers in use before and after the call | |
  | executor, a stream per rank
GIN between nodes: late puts, reordered puts, a network failure | emulated, on a fake of GIN | executor gin | | nodes
GIN: packing of short fragments, independent sends | emulated | packing gin_queues executor
GIN, host side: versions of NCCL, device communicator | host code on fakes | gin_host | | nodes
first execution: a failure of one rank is an error on all ranks, also without GIN | host code on fakes
  | refusals communicator
LL messages: four collectives, all types, sizes and strides | emulated | ll | launch and LL of 8 bytes; ll
multimem: sums and gathers; needs several GPUs, so no level 2 | emulated, on a fake of the switch | ll device_call
dispatch and combine inside a node: routings of all kinds, sums, overflow, CUDA graphs
  | emulated; handlers on a fake of XLA | rows row_calls
  | rows, slices and one exchange; JAX, 1 rank, command buffers on
route and dispatch of few tokens in one exchange: ids of all kinds, overflow, CUDA graphs
  | emulated; handlers on a fake of XLA | route_and_dispatch route_and_dispatch_calls
  | rows, slices and one exchange; JAX, 1 rank, command buffers on
dispatch and combine between nodes over GIN: routings of all kinds, sums, bytes, late and missing ranks
  | emulated, on a fake of GIN; handlers on a fake of XLA | rows row_calls
ragged_all_to_all inside a node: tables of all kinds, wrong tables, CUDA graphs | emulated; handlers on a fake of XLA
  | slices slice_calls | rows, slices and one exchange; JAX, 2 ranks
started transfers: a lane of their own beside synchronous calls, SMs for both, the order of calls
  | on fakes; schedule by XLA's compiler for GPUs | lanes | JAX, 1 rank, command buffers on
timeouts and reports | emulated | failures
after an abort, no kernel starts on the GPU or in the process; late ranks read no wrong data | emulated
  | failures call_failures
buffers that change between calls: exchange of offsets | emulated | exchange_offsets device_call |
  | windows processes-windows
windows on operands and results of user calls; refusals
  | handlers on fakes of XLA, CUDA and NCCL; the order of accesses in all executions | user_windows litmus node_calls
inside JAX: all operations, element types, loops, gradients, together with XLA's collectives
  | only the text of the lowering; handlers on a fake of XLA | cuda_lowering.py handlers.py stages
  | JAX, 1 rank, command buffers off | one-process graphs-off
inside JAX, in CUDA graphs | | | JAX, 1 rank, command buffers on | graphs-on
inside JAX, between processes | no; ranks are threads, on fakes | communicator | JAX, 2 ranks; JAX, 4 ranks
  | processes processes-graphs-on
inside JAX, between nodes | no; ranks are threads, on fakes | communicator | | nodes
communicators that XLA replaces | host code on fakes | own_communicators xla_collectives |
  | cliques processes-cliques nodes-cliques
the process exits while a thread runs | host code on fakes | exit
errors: no symmetric windows, NCCL too old | | | errors: no windows; errors: old NCCL
errors: a process is killed | | | errors: killed process
models/moe trains as on CPUs | | | models/moe, 1 rank: losses; models/moe, 2 ranks: losses
device API: signal, wait, barrier, put, get, reduce; level 2 tests only the part that the example uses | emulated
  | device_api
example kernel: residual + all_reduce + RMSNorm | emulated; compiled | example device_headers.py
  | example, virtual ranks
example kernel: ring all-gather that feeds a product | emulated; compiled
  | ring_example ring_calls litmus_examples device_headers.py | examples/all_gather_matmul, inside JAX
kernels of users between nodes: GIN, rails, an all-gather; late ranks and a network failure
  | emulated, on a fake of GIN; compiled; host code on fakes | gin_kernels node_calls device_headers.py
example kernel between nodes: one ring over NVLink and GIN; late ranks and a network failure
  | emulated, on a fake of GIN; compiled; host code on fakes
  | ring_example ring_calls litmus_examples device_headers.py
user handlers: communicator, arena, failures, versions of the headers; the example inside jit(shard_map)
  | host code on fakes | user_calls device_headers.py | examples/fused_rmsnorm, inside JAX
"""
FEATURES = [Feature.read(line) for line in re.sub(r"\n +", " ", TABLE).splitlines()]

HEAD = """# Status of the GPU back end

This page shows what the tests of each feature of the CUDA back end have shown. `tests/cuda/tools/status.py` writes it.
An empty field means: nothing.

- Level 1, without a GPU: how the tests of the feature run. *Emulated*: the source of the kernels runs on the CPU. *On
  fakes*: jaxcomm's code runs against stand-ins for CUDA, NCCL or XLA. Continuous integration requires that all of these
  tests pass, so the page does not repeat it.
- Level 2: run on one GPU ([five commands](gpu-tests.md)).
- Level 3: run on several GPUs or hosts (`tests/cuda/tools/bring_up.py`).

Levels 2 and 3 name the commit of the record. [Tests of the CUDA back end](tests.md#tests-of-the-cuda-back-end) lists
the commands.

| feature | level 1 | level 2 | level 3 |
|---|---|---|---|
"""


def mark(tests: tuple[str, ...], records: Iterable[dict]) -> str:
    """The outcome of these parts; empty if one of them has no outcome."""
    found = {test: (passed, record["commit"]) for record in records for test, passed in record.get("tests", {}).items()}
    if not tests or not set(tests) <= found.keys():
        return ""
    commits = sorted({found[test][1][:9] for test in tests})
    return f"{'passed' if all(found[test][0] for test in tests) else 'failed'} at {', '.join(commits)}"


def mark_rungs(rungs: tuple[str, ...], records: dict[str, dict]) -> str:
    found = {rung: mark((rung,), [records.get(rung, {})]) for rung in rungs}
    return "; ".join(f"{rung} {outcome}" for rung, outcome in found.items() if outcome)


def measured(bench: dict) -> str:
    """The targets of `make gpu-timings` and its results."""
    text = "\n| measured on one GPU | target | found |\n|---|---|---|\n"
    for what, found in bench["targets"].items():
        value = "" if found["value"] is None else f"{found['value']:g}{'' if found['met'] else ', not met'}"
        text += f"| {what} | {found['target']} | {value} |\n"
    return (
        text + f"\n{bench['device']}, driver {bench['driver']}, CUDA {bench['cuda']}, commit {bench['commit'][:9]}.\n"
    )


def page(level2: dict[str, dict], rungs: dict[str, dict]) -> str:
    """`level2`: records by command. `rungs`: by rung."""
    if "cpu" in [record.get("platform") for record in (*level2.values(), *rungs.values())]:
        raise ValueError("a rehearsal on CPUs shows nothing of a GPU")
    text = HEAD
    for row in FEATURES:
        level2_mark = mark(row.parts, level2.values())
        text += f"| {row.name} | {row.how} | {level2_mark} | {mark_rungs(row.rungs, rungs)} |\n"
    machines = {f"{record['device']}, driver {record['driver']}, CUDA {record['cuda']}" for record in level2.values()}
    if machines:
        text += f"\nLevel 2: {'; '.join(sorted(machines))}.\n"
    if not level2 and not rungs:
        text += "\nNothing has run on a GPU yet: no GPU was available.\n"
    return text + (measured(level2["timings"]) if "timings" in level2 else "")


def load(names: Iterable[str]) -> dict[str, dict]:
    paths = {name: RECORDS / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def stored() -> tuple[dict[str, dict], dict[str, dict]]:
    """The arguments of page() from the stored records."""
    return load(COMMANDS), load(rung for row in FEATURES for rung in row.rungs)


if __name__ == "__main__":
    PAGE.write_text(page(*stored()))
