"""Ring 2: runs what needs a GPU, step by step, each with a limit, and writes records as JSON.

    python tests/cuda/on_gpu.py test build/gpu out     # `make test-gpu`: out/test-gpu.json
    python tests/cuda/on_gpu.py bench build/gpu out    # `make bench-gpu`: out/bench-gpu.json

Ends with a short table, and with status 1 if a step failed.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]


def output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()[:100]}"


def machine() -> dict[str, str]:
    name, _, driver = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition(", ")
    return {
        "device": name,
        "driver": driver,
        "cuda": output("nvcc", "--version").rpartition("release ")[2].partition(",")[0],
        "commit": output("git", "rev-parse", "HEAD"),
    }


def steps(build: pathlib.Path) -> dict[str, tuple[list[str], int]]:
    """{name: (command, limit in seconds)}."""
    executor = str(build / "tests" / "cuda" / "test_gpu_executor")
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    return {
        "executor": ([executor], 180),
        "flagged": ([str(build / "tests" / "cuda" / "test_gpu_flagged")], 120),
        "executor, memcheck": ([sanitizer, "--error-exitcode=1", executor, "reduced"], 120),
        "executor, synccheck": ([sanitizer, "--tool=synccheck", "--error-exitcode=1", executor, "reduced"], 120),
    }


def run(command: list[str], limit_s: int, log: pathlib.Path) -> tuple[bool, float]:
    began = time.monotonic()
    with log.open("w") as file:
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            print(error, file=file)
            return False, 0.0
        try:
            passed = process.wait(timeout=limit_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what a sanitizer has started, too
            process.wait()
            print(f"did not end within {limit_s} s", file=file)
            passed = False
    return passed, time.monotonic() - began


def test(build: pathlib.Path, out: pathlib.Path) -> bool:
    record = machine() | {"tests": {}, "seconds": {}}
    for name, (command, limit_s) in steps(build).items():
        log = out / (name.replace(", ", "-") + ".log")
        passed, seconds = run(command, limit_s, log)
        record["tests"][name] = passed
        record["seconds"][name] = round(seconds, 1)
        if not passed:
            print(f"--- {name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]), flush=True)
    (out / "test-gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, passed in record["tests"].items():
        print(f"{'passed' if passed else 'FAILED':8}{record['seconds'][name]:7.1f} s  {name}")
    return all(record["tests"].values())


def bench(build: pathlib.Path, out: pathlib.Path) -> bool:
    log = out / "virtual-ranks.json"
    passed, _ = run([str(build / "tests" / "cuda" / "bench_virtual_ranks")], 400, log)
    if not passed:
        print("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
        return False
    record = machine() | json.loads(log.read_text())
    (out / "bench-gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    for cell in record["cells"]:
        where = f"{cell['nodes']}x{cell['ranks_per_node']}"
        print(
            f"{cell['op']:16}{cell['algorithm']:14}{where:5}{cell['rank_bytes']:10} B{cell['median_us']:10.1f} us"
            f"{cell['of_copy']:7.2f} of a copy"
        )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["test", "bench"])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return 0 if (test if args.what == "test" else bench)(args.build.resolve(), args.out) else 1


if __name__ == "__main__":
    sys.exit(main())
