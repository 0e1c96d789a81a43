"""Writes docs/development/gpu-status.md from the records in benchmarks/results/gpu.

There is one file per command of on_gpu.py (`make gpu-smoke` and so on), and one per rung of bring_up.py.
tests/cuda/test_status.py fails if the page is not that of the records.
"""

import json
import pathlib

from bring_up import RUNGS
from on_gpu import COMMANDS

ROOT = pathlib.Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "development" / "gpu-status.md"

HEAD = """# Status of the GPU back end

This page shows what has run on GPUs: the parts of the [five commands for one GPU](gpu-tests.md), and the rungs of the
[bring-up of several](gpu-tests.md#bring-up-several-gpus). `make gpu-status` writes it. What is not listed has not run
there. Without a GPU, the source of the kernels runs on the CPU, and the host code runs against stand-ins for CUDA, NCCL
and XLA: [Tests of the CUDA back end](tests.md#tests-of-the-cuda-back-end).
"""


def measured(bench: dict) -> str:
    """The targets of `make gpu-timings` and its results."""
    text = "\n| measured on one GPU | target | found |\n|---|---|---|\n"
    for what, found in bench["targets"].items():
        value = "" if found["value"] is None else f"{found['value']:g}{'' if found['met'] else ', not met'}"
        text += f"| {what} | {found['target']} | {value} |\n"
    return text


def page(records: dict[str, dict]) -> str:
    """`records`: by command or rung."""
    if "cpu" in [record.get("platform") for record in records.values()]:
        raise ValueError("a rehearsal on CPUs shows nothing of a GPU")
    if not records:
        return HEAD + "\nNothing has run on a GPU yet: no GPU was available.\n"
    text = HEAD + "\n| command or rung | part | outcome | commit |\n|---|---|---|---|\n"
    for name, record in records.items():
        for part, passed in record["tests"].items():
            text += f"| `{name}` | {part} | {'passed' if passed else 'failed'} | {record['commit'][:9]} |\n"
    if "timings" in records:
        text += measured(records["timings"])
    machines = {f"{r['device']}, driver {r['driver']}, CUDA {r['cuda']}" for r in records.values()}
    return f"{text}\nMachines: {'; '.join(sorted(machines))}.\n"


def stored() -> dict[str, dict]:
    """The stored records."""
    paths = {name: RECORDS / f"{name}.json" for name in (*COMMANDS, *RUNGS)}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


if __name__ == "__main__":
    PAGE.write_text(page(stored()))
