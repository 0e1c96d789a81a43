"""Scripts of parallel training in 2 processes of 4 devices: the losses and checkpoints of one process."""

import subprocess
import sys

import pytest
from training import ROOT, environment, flags, folder_to_start_in, metrics

from jaxcomm import run as launcher

LIMIT_S = 240
OPTIONS = {
    "layers": 1, "width": 16, "heads": 8, "hidden": 16, "batch": 8, "seq": 16, "warmup": 2, "decay_steps": 20,
    "steps": 6, "eval_every": 3, "eval_batches": 1, "save_every": 3, "data": str(ROOT / "models"),
}  # fmt: skip
pytestmark = [pytest.mark.full, pytest.mark.deadline(4 * LIMIT_S)]


def launch(folder, script, processes, **options):
    done = subprocess.run(
        [sys.executable, launcher.__file__, f"--processes={processes}", f"--devices={8 // processes}",
         f"--timeout={LIMIT_S}", "-m", f"models.{script}.train", *flags(**options)],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S + 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode(errors="replace")


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("tp", {"layout": "2x4"}),
        ("tp", {"layout": "1x8"}),
        ("zero", {"stage": 3}),
        ("cp", {"layout": "1x8"}),
        ("mesh", {"layers": 2, "layout": "2x1x2x2", "microbatches": 2}),
        ("mesh", {"layers": 2, "layout": "2x2x1x2", "microbatches": 2}),
        ("pp", {"layers": 4, "rounds": 1, "microbatches": 4}),
    ],
)
def test_two_processes_and_one_compute_the_same(script, options, tmp_path):
    folder_to_start_in(tmp_path)
    for processes in (1, 2):
        launch(tmp_path, script, processes, **{**OPTIONS, **options, "out": tmp_path / str(processes)})
    assert metrics(tmp_path / "2") == metrics(tmp_path / "1")  # bit for bit
