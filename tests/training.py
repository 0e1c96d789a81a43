"""A small run of models/moe, for tests that compare one in several processes with one in this process."""

import json
import os
import pathlib
import subprocess
import sys

from jaxcomm import run as launcher

ROOT = pathlib.Path(__file__).parents[1]
# Appended, so that an installed jaxcomm comes before its sources in the repository.
sys.path.append(str(ROOT))

from models.lm.train import train  # noqa: E402
from models.moe.config import Config  # noqa: E402
from models.moe.train import Run  # noqa: E402

OPTIONS = {
    "layers": 1, "width": 16, "heads": 2, "hidden": 16, "batch": 8, "seq": 16, "steps": 12, "warmup": 2,
    "decay_steps": 20, "lr": 1e-2, "eval_every": 4, "eval_batches": 2, "save_every": 3, "sample": 8, "prompt": "def",
    "data": str(ROOT / "models"),
}  # fmt: skip
TINY = Config(**OPTIONS)
OTHERS = {  # small runs of the other scripts
    "layers": 1, "width": 16, "heads": 8, "hidden": 16, "batch": 8, "seq": 16, "warmup": 2, "decay_steps": 20,
    "steps": 6, "eval_every": 3, "eval_batches": 1, "save_every": 3, "data": str(ROOT / "models"),
}  # fmt: skip


def flags(**options):
    return [f"--{name}={value}" for name, value in options.items()]


def folder_to_start_in(path):
    """Makes models/ importable there: a path to the root would hide an installed jaxcomm."""
    if not (path / "models").exists():
        (path / "models").symlink_to(ROOT / "models")
    return path


def environment():
    """Without what the tests, or a launcher of theirs, have set for JAX, but compiling as this process does."""
    own, compilation = (
        ("JAX", "OMPI", "PMI", "SLURM", "PJRT_NPROC"),
        ("COMPILATION_CACHE", "PERSISTENT_CACHE", "DISABLE"),
    )
    kept = tuple(f"JAX_{name}" for name in compilation)
    return {name: value for name, value in os.environ.items() if name.startswith(kept) or not name.startswith(own)}


def launch(folder, processes, *command, limit_s):
    """Runs a Python command in processes with 8 devices in all, started in a folder: (exit status, output)."""
    folder_to_start_in(folder)
    done = subprocess.run(
        ["env", "--default-signal=INT", sys.executable, launcher.__file__, f"--processes={processes}",
         f"--devices={8 // processes}", f"--timeout={limit_s}", *map(str, command)],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s + 30,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(errors="replace")


def train_here(out, resume=False, **options):
    return train(Run(Config(**{**OPTIONS, **options, "out": str(out)}), resume=resume))


def metrics(out):
    """The log of a training run without its speed."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in record.items() if name != "tokens_per_s"} for record in records]
