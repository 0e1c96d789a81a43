"""Writes docs/gpu-status.md: which features of the GPU back end have passed which level, according to test records.

    status.py --ctest build/native/ctest.xml --ctest build/thread/ctest.xml  # take these as level 1
    status.py                                                                # from the stored records

Records are in benchmarks/results/gpu: level1.json is what the first form keeps of ctest's reports; test-gpu.json and
bench-gpu.json are what `make test-gpu` and `make bench-gpu` leave. A feature has passed a level if there is a record of
each of its tests, and all passed.
"""

import argparse
import json
import pathlib
import subprocess
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "gpu-status.md"

# Feature: (tests of level 1, steps of level 2). Level 3 has no run.
FEATURES = {
    "kernels compile for sm_80, 90, 100, 120; no spills": (["pytest tests/cuda/test_build.py"], []),
    "executor: all plans, types, sizes, nodes of one GPU or of several": (
        ["native test_cuda_executor", "native test_cuda_executor.full", "thread test_cuda_executor"],
        ["executor", "executor, memcheck", "executor, racecheck", "executor, synccheck"],
    ),
    "the production kernel, a stream per rank, buffers in use before and after": ([], ["executor, a stream per rank"]),
    "GIN between nodes, on a fake: puts are late, in any order; the network stops": (
        ["native test_cuda_executor", "thread test_cuda_executor", "native test_cuda_gin", "thread test_cuda_gin"],
        [],
    ),
    "GIN: short runs are packed, sends don't wait for each other": (
        ["native test_cuda_packing", "native test_cuda_executor"],
        [],
    ),
    "GIN on the host: versions, device communicator": (["native test_cuda_gin_host"], []),
    "several nodes: rounds of NCCL's sends and receives, failures": (
        ["native test_cuda_executor", "native test_cuda_send_recv_schedule", "native test_cuda_between_nodes"],
        [],
    ),
    "first runs: what one rank can't do is an error on all; rounds where NCCL has no GIN after all": (
        ["native test_cuda_between_nodes"],
        [],
    ),
    "mutants of the executor are noticed": (["native test_cuda_mutants", "thread test_cuda_mutants"], []),
    "LL messages: four collectives, all types, sizes, strides": (
        ["native test_cuda_ll", "native test_cuda_ll.full", "thread test_cuda_ll"],
        ["ll"],
    ),
    "multimem, on request: sums and gathers through a switch; one GPU has none, so no level 2": (
        ["native test_cuda_multimem", "thread test_cuda_multimem", "native test_cuda_device_call"],
        [],
    ),
    "timeouts and reports": (["native test_cuda_failures", "thread test_cuda_failures"], []),
    "nothing begins after a kernel has aborted, on its GPU and in its process; late ranks get no other data": (
        ["native test_cuda_failures", "thread test_cuda_failures", "native test_cuda_call_failures"],
        [],
    ),
    "buffers that move: ranks tell each other where theirs are": (
        ["native test_cuda_exchange_offsets", "thread test_cuda_exchange_offsets", "native test_cuda_device_call"],
        [],
    ),
    "inside JAX: all ops, types, loops, gradients, beside collectives of XLA": (
        ["pytest tests/cuda/test_cuda_lowering.py", "pytest tests/cuda/test_handlers.py", "native test_cuda_call"],
        ["JAX, 1 rank, command buffers off"],
    ),
    "the same in CUDA graphs": ([], ["JAX, 1 rank, command buffers on"]),
    "the same between processes": (
        ["native test_cuda_communicator", "native test_cuda_stages"],
        ["JAX, 2 ranks", "JAX, 4 ranks"],
    ),
    "the same between nodes": ([], ["JAX, 2 ranks as 2 nodes", "JAX, 4 ranks as 2 nodes"]),
    "errors: no windows, NCCL too old": ([], ["errors: no windows", "errors: old NCCL"]),
    "errors: a process is killed": ([], ["errors: killed process"]),
    "models/moe learns as on CPUs": ([], ["models/moe, 1 rank: losses", "models/moe, 2 ranks: losses"]),
    "device API: signal, wait, barrier, put, get, reduce; on a GPU only as far as the example uses it": (
        ["native test_cuda_device_api", "thread test_cuda_device_api"],
        [],
    ),
    "example of a user's kernel: residual + all_reduce + RMSNorm": (
        ["native test_cuda_example", "thread test_cuda_example", "pytest tests/cuda/test_device_headers.py"],
        ["example, virtual ranks"],
    ),
    "handlers of users: communicator, arena, failures, versions; the example inside jit(shard_map)": (
        [
            "native test_cuda_user_calls",
            "pytest tests/cuda/test_device_headers.py",
            "pytest tests/test_ffi.py",
        ],
        ["example, inside JAX"],
    ),
}

HEAD = """# GPU back end: what has been shown

Level 1: compiled by nvcc, and the same source run on the CPU by emulation. Level 2: run on one GPU. Level 3: many GPUs
and hosts. This page is written by `tests/cuda/tools/status.py` from the records in `benchmarks/results/gpu`; what is
not marked has not been shown by any run that is recorded there.

| feature | level 1 | level 2 | level 3 |
|---|---|---|---|
"""


def of_ctest(path: pathlib.Path) -> dict[str, bool]:
    """{"<flavour> <test>": passed} of ctest --output-junit; the folder is the flavour, or build/ for native."""
    flavour = "native" if path.parent.name == "build" else path.parent.name
    return {
        f"{flavour} {case.get('name')}": case.get("status") == "run"
        for case in ElementTree.parse(path).getroot().iter("testcase")
    }


def of_pytest(path: pathlib.Path) -> dict[str, bool]:
    """{"pytest <file>": all passed} of a report of pytest --junit-xml; a skipped test has not passed."""
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


def page(ring1: dict, ring2: dict, bench: dict) -> str:
    if "cpu" in (ring2.get("platform"), bench.get("platform")):
        raise ValueError("a rehearsal on CPUs shows nothing of a GPU")
    text = HEAD
    for feature, (emulated, on_gpu) in FEATURES.items():
        text += f"| {feature} | {mark(emulated, ring1)} | {mark(on_gpu, ring2)} | |\n"
    if ring2:
        text += f"\nRing 2: {ring2['device']}, driver {ring2['driver']}, CUDA {ring2['cuda']}.\n"
    else:
        text += "\nNo GPU has been at hand for level 2 yet: `make test-gpu bench-gpu` are ready to run.\n"
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
