"""models/moe on 2 hosts x 2 processes x 2 devices: the losses of one process, and checkpoints in both directions.

Hosts can't read each other's memory, so psum is hierarchical there. One process with --psum hierarchical adds in the
same order, and the losses are bit-identical. With the default of one process, they differ by rounding.
"""

import netns
import pytest
from launching import train_on
from training import OPTIONS, flags, metrics, train_here

SCRIPT, LIMIT_S = "models.moe.train", 200
SHORT = {**OPTIONS, "steps": 6, "eval_every": 100}  # evaluates at the end only
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(3 * LIMIT_S),
]


@pytest.fixture(scope="module")
def hosts():
    with netns.Hosts(2, rate_bits_per_s=1e9, delay_s=0.2e-3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder of an uninterrupted run in one process."""
    out = tmp_path_factory.mktemp("alone")
    train_here(out, **SHORT, psum="hierarchical")
    return out


def losses(out):
    return [record["loss"] for record in metrics(out) if "loss" in record]


def test_hosts_and_one_process_compute_the_same(alone, hosts, tmp_path):
    out = tmp_path / "run"
    before = hosts.counters(0).sent_bytes
    train_on(hosts, tmp_path, SCRIPT, *flags(**SHORT, out=out), limit_s=LIMIT_S)
    assert hosts.counters(0).sent_bytes - before > 300_000  # gradients of all steps
    assert metrics(out) == metrics(alone)  # bit for bit
    assert (out / "sample.txt").read_bytes() == (alone / "sample.txt").read_bytes()

    with_direct = tmp_path / "direct"
    train_here(with_direct, **SHORT)
    assert losses(with_direct) == pytest.approx(losses(out), rel=1e-5)


def test_hosts_and_one_process_continue_each_other(alone, hosts, tmp_path):
    """1 process, then the hosts, then 1 process: the losses of an uninterrupted run."""
    out = tmp_path / "run"
    train_here(out, **{**SHORT, "steps": 2, "sample": 0}, psum="hierarchical")
    arguments = ["--resume", *flags(out=out, steps=4, sample=0, eval_every=100)]
    train_on(hosts, tmp_path, SCRIPT, *arguments, limit_s=LIMIT_S)
    train_here(out, resume=True, **SHORT, psum="hierarchical")
    assert losses(out) == losses(alone)  # bit for bit
    assert metrics(out)[-1] == metrics(alone)[-1]  # held-out text
    assert (out / "sample.txt").read_bytes() == (alone / "sample.txt").read_bytes()
