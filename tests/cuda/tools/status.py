"""Writes docs/development/gpu-status.md: which levels of tests each feature of the GPU back end has passed.

    status.py --ctest build/native/ctest.xml --ctest build/thread/ctest.xml  # new results of level 1
    status.py                                                                # from the stored records

Records are in benchmarks/results/gpu. The first form writes level1.json, `make test-gpu` test-gpu.json, and `make
bench-gpu` bench-gpu.json. A feature has passed a level if each of its tests has a record, and all passed.
"""

import argparse
import json
import pathlib
import subprocess
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "development" / "gpu-status.md"

# Feature: (tests of level 1, steps of level 2). Level 3 has no run.
FEATURES = {
    "kernels compile for sm_80, 90, 100, 120 without register spills": (["pytest tests/cuda/test_build.py"], []),
    "executor: all plans, element types and sizes, on one node and on several": (
        ["native test_cuda_executor", "native test_cuda_executor.full", "thread test_cuda_executor"],
        ["executor", "executor, memcheck", "executor, racecheck", "executor, synccheck"],
    ),
    "executor kernel as shipped: one stream per rank, buffers in use before and after the call": (
        [],
        ["executor, a stream per rank"],
    ),
    "GIN between nodes, on a fake network: late puts, reordered puts, a network failure": (
        ["native test_cuda_executor", "thread test_cuda_executor", "native test_cuda_gin", "thread test_cuda_gin"],
        [],
    ),
    "GIN: packing of short contiguous runs, independent sends": (
        ["native test_cuda_packing", "native test_cuda_executor"],
        [],
    ),
    "GIN, host side: versions of NCCL, device communicator": (["native test_cuda_gin_host"], []),
    "send and receive between nodes, failures": (
        ["native test_cuda_executor", "native test_cuda_send_recv_schedule", "native test_cuda_between_nodes"],
        [],
    ),
    "first execution: a failure of one rank is an error on all ranks; fallback without GIN": (
        ["native test_cuda_between_nodes"],
        [],
    ),
    "mutants of the executor are caught": (["native test_cuda_mutants", "thread test_cuda_mutants"], []),
    "LL messages: four collectives, all types, sizes and strides": (
        ["native test_cuda_ll", "native test_cuda_ll.full", "thread test_cuda_ll"],
        ["ll"],
    ),
    "multimem: sums and gathers; needs several GPUs, so no level 2": (
        ["native test_cuda_multimem", "thread test_cuda_multimem", "native test_cuda_device_call"],
        [],
    ),
    "timeouts and reports": (["native test_cuda_failures", "thread test_cuda_failures"], []),
    "after an abort, no kernel starts on the GPU or in the process; late ranks read no wrong data": (
        ["native test_cuda_failures", "thread test_cuda_failures", "native test_cuda_call_failures"],
        [],
    ),
    "buffers that change between calls: exchange of offsets": (
        ["native test_cuda_exchange_offsets", "thread test_cuda_exchange_offsets", "native test_cuda_device_call"],
        [],
    ),
    "inside JAX: all operations, element types, loops, gradients, together with XLA's collectives": (
        ["pytest tests/cuda/test_cuda_lowering.py", "pytest tests/cuda/test_handlers.py", "native test_cuda_call"],
        ["JAX, 1 rank, command buffers off"],
    ),
    "inside JAX, in CUDA graphs": ([], ["JAX, 1 rank, command buffers on"]),
    "inside JAX, between processes": (
        ["native test_cuda_communicator", "native test_cuda_stages"],
        ["JAX, 2 ranks", "JAX, 4 ranks"],
    ),
    "inside JAX, between nodes": ([], ["JAX, 2 ranks as 2 nodes", "JAX, 4 ranks as 2 nodes"]),
    "errors: no symmetric windows, NCCL too old": ([], ["errors: no windows", "errors: old NCCL"]),
    "errors: a process is killed": ([], ["errors: killed process"]),
    "models/moe trains as on CPUs": ([], ["models/moe, 1 rank: losses", "models/moe, 2 ranks: losses"]),
    "device API: signal, wait, barrier, put, get, reduce; level 2 tests only the part that the example uses": (
        ["native test_cuda_device_api", "thread test_cuda_device_api"],
        [],
    ),
    "example kernel: residual + all_reduce + RMSNorm": (
        ["native test_cuda_example", "thread test_cuda_example", "pytest tests/cuda/test_device_headers.py"],
        ["example, virtual ranks"],
    ),
    "user handlers: communicator, arena, failures, versions of the headers; the example inside jit(shard_map)": (
        [
            "native test_cuda_user_calls",
            "pytest tests/cuda/test_device_headers.py",
            "pytest tests/test_ffi.py",
        ],
        ["example, inside JAX"],
    ),
}

HEAD = """# Status of the GPU back end

This page shows the test results of each feature of the CUDA back end. `tests/cuda/tools/status.py` writes it from the
records in `benchmarks/results/gpu`. An empty field means that no recorded run has tested the feature.

- Level 1: compiled by nvcc, and the same source run on the CPU by emulation.
- Level 2: run on one GPU.
- Level 3: run on many GPUs and hosts.

[Tests of the CUDA back end](tests.md#tests-of-the-cuda-back-end) lists the commands.

| feature | level 1 | level 2 | level 3 |
|---|---|---|---|
"""


def of_ctest(path: pathlib.Path) -> dict[str, bool]:
    """Reads a report of ctest --output-junit: {"<flavour> <test>": passed}. Folder: flavour; build/ is native."""
    flavour = "native" if path.parent.name == "build" else path.parent.name
    return {
        f"{flavour} {case.get('name')}": case.get("status") == "run"
        for case in ElementTree.parse(path).getroot().iter("testcase")
    }


def of_pytest(path: pathlib.Path) -> dict[str, bool]:
    """Reads a report of pytest --junit-xml: {"pytest <file>": all passed}. A skipped test has not passed."""
    passed: dict[str, bool] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = "pytest " + case.get("classname", "").replace(".", "/") + ".py"
        passed[name] = passed.get(name, True) and len([child for child in case if child.tag != "properties"]) == 0
    return passed


def mark(tests: list[str], record: dict) -> str:
    results = [record.get("tests", {}).get(test) for test in tests]
    if not tests or None in results:
        return ""
    return f"{'passed' if all(results) else 'FAILED'} ({record['commit'][:9]})"


def measured(bench: dict) -> str:
    """The targets of `make bench-gpu` and its results."""
    text = "\n| measured on one GPU | target | found |\n|---|---|---|\n"
    for what, found in bench["targets"].items():
        value = "" if found["value"] is None else f"{found['value']:g}{'' if found['met'] else ', not met'}"
        text += f"| {what} | {found['target']} | {value} |\n"
    return (
        text + f"\n{bench['device']}, driver {bench['driver']}, CUDA {bench['cuda']}, commit {bench['commit'][:9]}.\n"
    )


def page(level1: dict, level2: dict, bench: dict) -> str:
    if "cpu" in (level2.get("platform"), bench.get("platform")):
        raise ValueError("this record is of a rehearsal on CPUs, not of a GPU")
    text = HEAD
    for feature, (emulated, on_gpu) in FEATURES.items():
        text += f"| {feature} | {mark(emulated, level1)} | {mark(on_gpu, level2)} | |\n"
    if level2:
        text += f"\nLevel 2: {level2['device']}, driver {level2['driver']}, CUDA {level2['cuda']}.\n"
    else:
        text += "\nNothing has run on a GPU yet: no GPU was available for level 2.\n"
    return text + (measured(bench) if bench else "")


def load(name: str) -> dict:
    path = RECORDS / name
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctest", type=pathlib.Path, action="append", default=[])
    parser.add_argument("--pytest", type=pathlib.Path, action="append", default=[])
    args = parser.parse_args()
    if args.ctest or args.pytest:
        wanted = {test for tests, _ in FEATURES.values() for test in tests}
        found: dict[str, bool] = {}
        for path in args.ctest:
            found |= of_ctest(path)
        for path in args.pytest:
            found |= of_pytest(path)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
        tests = {test: found[test] for test in sorted(wanted & found.keys())}
        record = {"commit": commit.stdout.strip(), "tests": tests}
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / "level1.json").write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(load("level1.json"), load("test-gpu.json"), load("bench-gpu.json")))


if __name__ == "__main__":
    main()
