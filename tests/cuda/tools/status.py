"""Writes docs/development/gpu-status.md: what each level of tests shows of each feature of the GPU back end.

Level 1 needs no record: the page says how the tests of a feature run without a GPU, and continuous integration fails if
one of them fails. Levels 2 and 3 show records in benchmarks/results/gpu: one file per command of on_gpu.py
(`make gpu-smoke` and so on), and one per rung of bring_up.py. tests/cuda/test_status.py fails if the page is not
that of the records.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable

from on_gpu import COMMANDS

ROOT = pathlib.Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "development" / "gpu-status.md"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
      name: first column.
      how: how its tests run without a GPU. "emulated" if they run the source of the kernels themselves.
      tests: these tests: names of native tests and files of pytest.
      parts: parts of the commands of on_gpu.py, level 2.
      rungs: rungs of bring_up.py, level 3.
    """

    name: str
    how: str = ""
    tests: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()


FEATURES = (
    Feature("kernels compile for sm_80, 90, 100, 120 without register spills", "compiled", ("test_build.py",)),
    Feature(
        "executor: all plans, element types and sizes, on one node and on several",
        "emulated",
        ("test_cuda_executor",),
        ("executor", "executor, memcheck", "executor, racecheck", "executor, synccheck"),
    ),
    Feature(
        "staging ring: large calls pass through slots of the arena, in all layouts",
        "emulated; a model of the protocol in all executions",
        ("test_cuda_executor", "test_cuda_litmus", "test_cuda_call"),
        ("executor",),
    ),
    Feature(
        "bulk copies (TMA) in place of loads and stores: JAXCOMM_BULK_COPY=1",
        "emulated; a model of the protocol in all executions",
        ("test_cuda_bulk_copies", "test_cuda_litmus_rows", "test_cuda_executor", "test_cuda_slices"),
        ("executor",),
    ),
    Feature(
        "executor kernel as shipped: one stream per rank, buffers in use before and after the call",
        parts=("executor, a stream per rank",),
    ),
    Feature(
        "GIN between nodes: late puts, reordered puts, a network failure",
        "emulated, on a fake of GIN",
        ("test_cuda_executor", "test_cuda_gin"),
        rungs=("nodes",),
    ),
    Feature(
        "GIN: packing of short fragments, independent sends",
        "emulated",
        ("test_cuda_packing", "test_cuda_gin_queues", "test_cuda_executor"),
    ),
    Feature(
        "GIN, host side: versions of NCCL, device communicator",
        "host code on fakes",
        ("test_cuda_gin_host",),
        rungs=("nodes",),
    ),
    Feature(
        "first execution: a failure of one rank is an error on all ranks, also without GIN",
        "host code on fakes",
        ("test_cuda_refusals", "test_cuda_communicator"),
    ),
    Feature(
        "LL messages: four collectives, all types, sizes and strides",
        "emulated",
        ("test_cuda_ll",),
        ("launch and LL of 8 bytes", "ll"),
    ),
    Feature(
        "multimem: sums and gathers; needs several GPUs, so no level 2",
        "emulated, on a fake of the switch",
        ("test_cuda_ll", "test_cuda_device_call"),
    ),
    Feature(
        "dispatch and combine inside a node: routings of all kinds, sums, overflow, CUDA graphs",
        "emulated; handlers on a fake of XLA",
        ("test_cuda_rows", "test_cuda_row_calls"),
        ("rows, slices and one exchange", "JAX, 1 rank, command buffers on"),
    ),
    Feature(
        "route and dispatch of few tokens in one exchange: ids of all kinds, overflow, CUDA graphs",
        "emulated; handlers on a fake of XLA",
        ("test_cuda_route_and_dispatch", "test_cuda_route_and_dispatch_calls"),
        ("rows, slices and one exchange", "JAX, 1 rank, command buffers on"),
    ),
    Feature(
        "dispatch and combine between nodes over GIN: routings of all kinds, sums, bytes, late and missing ranks",
        "emulated, on a fake of GIN; handlers on a fake of XLA",
        ("test_cuda_rows", "test_cuda_row_calls"),
    ),
    Feature(
        "ragged_all_to_all inside a node: tables of all kinds, wrong tables, CUDA graphs",
        "emulated; handlers on a fake of XLA",
        ("test_cuda_slices", "test_cuda_slice_calls"),
        ("rows, slices and one exchange", "JAX, 2 ranks"),
    ),
    Feature(
        "started transfers: a lane of their own beside synchronous calls, SMs for both, the order of calls",
        "on fakes; schedule by XLA's compiler for GPUs",
        ("test_cuda_lanes",),
        ("JAX, 1 rank, command buffers on",),
    ),
    Feature("timeouts and reports", "emulated", ("test_cuda_failures",)),
    Feature(
        "after an abort, no kernel starts on the GPU or in the process; late ranks read no wrong data",
        "emulated",
        ("test_cuda_failures", "test_cuda_call_failures"),
    ),
    Feature(
        "buffers that change between calls: exchange of offsets",
        "emulated",
        ("test_cuda_exchange_offsets", "test_cuda_device_call"),
        rungs=("windows", "processes-windows"),
    ),
    Feature(
        "windows on operands and results of user calls; refusals",
        "handlers on fakes of XLA, CUDA and NCCL; the order of accesses in all executions",
        ("test_cuda_user_windows", "test_cuda_litmus", "test_cuda_node_calls"),
    ),
    Feature(
        "inside JAX: all operations, element types, loops, gradients, together with XLA's collectives",
        "only the text of the lowering; handlers on a fake of XLA",
        ("test_cuda_lowering.py", "test_handlers.py", "test_cuda_stages"),
        ("JAX, 1 rank, command buffers off",),
        ("one-process", "graphs-off"),
    ),
    Feature("inside JAX, in CUDA graphs", parts=("JAX, 1 rank, command buffers on",), rungs=("graphs-on",)),
    Feature(
        "inside JAX, between processes",
        "no; ranks are threads, on fakes",
        ("test_cuda_communicator",),
        ("JAX, 2 ranks", "JAX, 4 ranks"),
        ("processes", "processes-graphs-on"),
    ),
    Feature(
        "inside JAX, between nodes",
        "no; ranks are threads, on fakes",
        ("test_cuda_communicator",),
        rungs=("nodes",),
    ),
    Feature(
        "communicators that XLA replaces",
        "host code on fakes",
        ("test_cuda_own_communicators", "test_cuda_xla_collectives"),
        rungs=("cliques", "processes-cliques", "nodes-cliques"),
    ),
    Feature("the process exits while a thread runs", "host code on fakes", ("test_cuda_exit",)),
    Feature("errors: no symmetric windows, NCCL too old", parts=("errors: no windows", "errors: old NCCL")),
    Feature("errors: a process is killed", parts=("errors: killed process",)),
    Feature("models/moe trains as on CPUs", parts=("models/moe, 1 rank: losses", "models/moe, 2 ranks: losses")),
    Feature(
        "device API: signal, wait, barrier, put, get, reduce; level 2 tests only the part that the example uses",
        "emulated",
        ("test_cuda_device_api", "test_cuda_device_counters"),
    ),
    Feature(
        "example kernel: residual + all_reduce + RMSNorm",
        "emulated; compiled",
        ("test_cuda_example", "test_device_headers.py"),
        ("example, virtual ranks",),
    ),
    Feature(
        "example kernel: ring all-gather that feeds a product",
        "emulated; compiled",
        ("test_cuda_ring_example", "test_cuda_ring_calls", "test_cuda_litmus_examples", "test_device_headers.py"),
        ("examples/all_gather_matmul, inside JAX",),
    ),
    Feature(
        "kernels of users between nodes: GIN, rails, an all-gather; late ranks and a network failure",
        "emulated, on a fake of GIN; compiled; host code on fakes",
        ("test_cuda_gin_kernels", "test_cuda_node_calls", "test_device_headers.py"),
    ),
    Feature(
        "example kernel between nodes: one ring over NVLink and GIN; late ranks and a network failure",
        "emulated, on a fake of GIN; compiled; host code on fakes",
        ("test_cuda_ring_example", "test_cuda_ring_calls", "test_cuda_litmus_examples", "test_device_headers.py"),
    ),
    Feature(
        "user handlers: communicator, arena, failures, versions of the headers; the example inside jit(shard_map)",
        "host code on fakes",
        ("test_cuda_user_calls", "test_device_headers.py"),
        ("examples/fused_rmsnorm, inside JAX",),
    ),
)

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
