"""docs/guide/clusters.md with the daemons of Slurm on two hosts of network namespaces."""

import os
import pathlib
import re
import sys
import tempfile

import netns
import pytest
import slurm
import training

LIMIT_S = 400
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "guide" / "clusters.md").read_text()
HELLO = re.search(r"^## The script\n.*?^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)[1]
SCRIPT, RESTARTS = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(netns.why_not() or slurm.why_not()), reason=netns.why_not() or slurm.why_not()),
    pytest.mark.deadline(2 * LIMIT_S),
]


@pytest.fixture
def cluster(monkeypatch):
    for name in [name for name in os.environ if name not in training.environment()]:
        monkeypatch.delenv(name)  # jobs inherit the rest
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin", prepend=os.pathsep)
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,  # short enough for a socket
        netns.Hosts(2) as hosts,
        slurm.Cluster(hosts, folder) as cluster,
    ):
        training.folder_to_start_in(cluster.folder)
        yield cluster


def kill(cluster, job, host):
    """Kills the tasks of a job on a host, not its batch script."""
    listed = cluster.run("scontrol", "listpids", job, f"host{host}", host=host)
    for pid, _, step, *_ in map(str.split, listed.splitlines()[1:]):
        if step.isdigit():
            cluster.run("kill", "-9", pid, host=host)


@pytest.mark.parametrize("on_each", [1, 2])
def test_the_script(cluster, on_each):
    (cluster.folder / "hello.py").write_text(HELLO)
    script = SCRIPT.replace("per-node=1", f"per-node={on_each}").replace("per-task=8", "per-task=4")
    output = cluster.wait(cluster.sbatch(script), "COMPLETED")
    size = 2 * on_each
    said = [f"process {rank} of {size}: {4 * size} devices, ranks {list(range(size))}" for rank in range(size)]
    assert sorted(re.findall(r"process .*?\]", output)) == said, output


def test_training_whose_process_is_killed(cluster, tmp_path):
    """The job is requeued and goes on from its checkpoint: the losses are those of an uninterrupted run."""
    options = {**training.OPTIONS, "eval_every": 100}
    script = RESTARTS.replace("$resume", f"$resume {' '.join(training.flags(**options))}")
    run = cluster.folder / "runs" / "moe"
    job = cluster.sbatch(script)
    cluster.wait(job, lambda: (run / "checkpoints" / "3").exists())
    kill(cluster, job, 1)
    output = cluster.wait(job, "COMPLETED")
    assert cluster.state(job)["Restarts"] == "1", output
    training.train_here(tmp_path, **options, psum="hierarchical")
    assert training.metrics(run) == training.metrics(tmp_path)  # bit for bit


def test_a_trainer_that_is_requeued_and_a_generator(cluster):
    """Two jobs, joined by jaxcomm.transfer. The generator goes on with the weights of the trainer's new incarnation."""
    (cluster.folder / "secret").write_bytes(os.urandom(32))
    program = f"srun python {pathlib.Path(__file__).with_name('with_slurm.py')}"
    requeued = f"{program} trainer {cluster.folder} || scontrol requeue $SLURM_JOB_ID"
    trainer = cluster.sbatch(f"#!/bin/sh\n{requeued}\n", "--requeue", "--nodelist=host0")
    generator = cluster.sbatch(f"#!/bin/sh\n{program} generator {cluster.folder} 1\n", "--nodelist=host1")
    cluster.wait(generator, "after 0 restarts, on host1")
    kill(cluster, trainer, 0)
    output = cluster.wait(generator, "COMPLETED")
    assert "PeerLost jaxcomm.transfer: fetch: 'weights' of endpoint 'trainer' (incarnation" in output
    assert "weights of trainer after 1 restarts, on host1" in output
    assert cluster.state(generator)["Restarts"] == "0" and cluster.state(trainer)["Restarts"] == "1"
