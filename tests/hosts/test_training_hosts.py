"""models/ on 2 hosts x 2 processes x 2 devices: the losses of one process, and checkpoints in both directions.

Hosts can't read each other's memory, so sums are added in another order there, and losses differ by rounding. With
models/moe --psum hierarchical, one process adds in that order too: its losses are bit-identical.
"""

import importlib
import subprocess
import sys

import netns
import pytest
import training
from training import flags, metrics, train_here

from models.lm import train as lm

LIMIT_S = 400
SHORT = {**training.OPTIONS, "steps": 6, "eval_every": 100}  # evaluates at the end only
OPTIONS = {**training.OTHERS, "layers": 2, "eval_every": 100, "save_every": 100}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(2 * LIMIT_S),
]


@pytest.fixture(scope="module")
def hosts():
    with netns.Hosts(2, rate_bits_per_s=1e9, delay_s=0.2e-3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder of an uninterrupted run of models/moe in one process."""
    out = tmp_path_factory.mktemp("alone")
    train_here(out, **SHORT, psum="hierarchical")
    return out


def train_on(hosts, folder, script, *arguments):
    """Runs a script in two processes of each host. Hosts share files only. Returns the bytes that host 0 has sent."""
    training.folder_to_start_in(folder)
    before = hosts.sent_bytes(0)
    processes, outputs = [], []
    for rank in range(4):
        env = training.environment() | {"JAXCOMM_NETWORK_DEVICES": "eth0", "JAX_PROCESS_ID": str(rank)}
        env |= {"JAX_COORDINATOR_ADDRESS": f"{hosts.address(0)}:23456", "JAX_NUM_PROCESSES": "4"}
        outputs.append(folder / f"output {rank}")
        with open(outputs[-1], "w") as output:
            command = [sys.executable, "-m", f"models.{script}.train", *arguments]
            processes.append(
                hosts.start(rank // 2, command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
            )
    statuses = [process.wait(LIMIT_S) for process in processes]
    assert statuses == [0] * 4, "\n".join(output.read_text()[-3000:] for output in outputs)
    return hosts.sent_bytes(0) - before


def losses(out):
    return [record["loss"] for record in metrics(out) if "loss" in record]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("tp", {"layout": "2x4"}),
        ("tp", {"layout": "1x8"}),  # a group on both hosts
        ("zero", {"stage": 3}),
        ("cp", {"layout": "1x8"}),
        ("pp", {"layers": 4, "rounds": 1, "microbatches": 4}),
        ("mesh", {"layout": "2x1x2x2", "microbatches": 2}),  # a stage on each host
        ("mesh", {"layout": "1x2x2x2", "microbatches": 2, "experts": 8}),  # experts on both hosts
    ],
)
def test_hosts_and_one_process_train_alike(script, options, hosts, tmp_path):
    options = {**OPTIONS, **options}
    sent = train_on(hosts, tmp_path, script, *flags(**options, out=tmp_path / "hosts"))
    assert sent > 50_000  # gradients or activations of all steps
    module = importlib.import_module(f"models.{script}.parallel")
    assert lm.main(module.Config, module.build, flags(**options, out=tmp_path / "alone")) == 0
    for found, wanted in zip(metrics(tmp_path / "hosts"), metrics(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_sums_of_one_node_and_of_several_nodes_train_alike(alone, tmp_path):
    train_here(tmp_path, **SHORT)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)


def test_hosts_and_one_process_continue_each_other(alone, hosts, tmp_path):
    """The hosts, then 1 process, then the hosts: the losses of an uninterrupted run."""
    out = tmp_path / "run"
    start = {name: value for name, value in SHORT.items() if name != "prompt"} | {"steps": 2, "sample": 0}
    assert train_on(hosts, tmp_path, "moe", *flags(**start, out=out)) > 100_000  # gradients of all steps
    train_here(out, resume=True, **{**start, "steps": 4}, psum="hierarchical")
    train_on(hosts, tmp_path, "moe", "--resume", *flags(out=out, steps=6, sample=SHORT["sample"], prompt="def"))
    assert losses(out) == losses(alone)  # bit for bit
    assert metrics(out)[-1] == metrics(alone)[-1]  # held-out text
    assert (out / "sample.txt").read_bytes() == (alone / "sample.txt").read_bytes()
