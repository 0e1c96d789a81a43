"""Scripts of parallel training in 2 processes of 4 devices: the losses and checkpoints of one process."""

import subprocess
import sys

import numpy as np
import pytest
from training import ROOT, environment, flags, folder_to_start_in, metrics

from jaxcomm import run as launcher

LIMIT_S = 240
OPTIONS = {
    "layers": 1, "width": 16, "heads": 8, "hidden": 16, "batch": 8, "seq": 16, "warmup": 2, "decay_steps": 20,
    "steps": 6, "eval_every": 3, "eval_batches": 1, "save_every": 3, "data": str(ROOT / "models"),
}  # fmt: skip
pytestmark = [pytest.mark.full, pytest.mark.deadline(4 * LIMIT_S)]


def launch(folder, script, processes, *arguments, **options):
    done = subprocess.run(
        [sys.executable, launcher.__file__, f"--processes={processes}", f"--devices={8 // processes}",
         f"--timeout={LIMIT_S}", "-m", f"models.{script}.train", *arguments, *flags(**options)],
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


def test_other_processes_continue_on_another_mesh(tmp_path):
    """Three steps on 2 x 4 ranks in 2 processes, then three on 4 x 2 in 4: the losses of one device."""
    folder_to_start_in(tmp_path)
    launch(tmp_path, "tp", 2, **{**OPTIONS, "layout": "2x4", "steps": 3, "out": tmp_path / "moved"})
    launch(tmp_path, "tp", 4, "--resume", layout="4x2", steps=6, out=tmp_path / "moved")
    launch(tmp_path, "tp", 1, **{**OPTIONS, "layout": "1x1", "out": tmp_path / "one"})
    found, wanted = ([r["loss"] for r in metrics(tmp_path / name) if "loss" in r] for name in ("moved", "one"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
