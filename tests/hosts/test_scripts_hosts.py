"""models/tp, zero and mesh on 2 hosts x 2 processes x 2 devices: the losses of one process, up to rounding.

Hosts can't read each other's memory, so sums are added in another order there.
"""

import importlib

import netns
import pytest
from launching import train_on
from training import ROOT, flags, metrics

from models.lm import train as lm

LIMIT_S = 400
OPTIONS = {
    "layers": 2, "width": 16, "heads": 8, "hidden": 16, "batch": 8, "seq": 16, "warmup": 2, "decay_steps": 20,
    "steps": 6, "eval_every": 100, "eval_batches": 1, "save_every": 100, "data": str(ROOT / "models"),
}  # fmt: skip
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.deadline(2 * LIMIT_S),
]


@pytest.fixture(scope="module")
def hosts():
    with netns.Hosts(2, rate_bits_per_s=1e9, delay_s=0.2e-3) as hosts:
        yield hosts


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("tp", {"layout": "2x4"}),
        ("tp", {"layout": "1x8"}),  # a group on both hosts
        ("zero", {"stage": 3}),
        ("mesh", {"layout": "2x1x2x2", "microbatches": 2}),  # a stage on each host
        ("mesh", {"layout": "1x2x2x2", "microbatches": 2, "experts": 8}),  # experts on both hosts
    ],
)
def test_hosts_and_one_process_train_alike(script, options, hosts, tmp_path):
    options = {**OPTIONS, **options}
    before = hosts.counters(0).sent_bytes
    train_on(hosts, tmp_path, f"models.{script}.train", *flags(**options, out=tmp_path / "hosts"), limit_s=LIMIT_S)
    assert hosts.counters(0).sent_bytes - before > 50_000  # gradients or activations of all steps

    module = importlib.import_module(f"models.{script}.parallel")
    assert lm.main(module.Config, module.build, flags(**options, out=tmp_path / "alone")) == 0
    for found, wanted in zip(metrics(tmp_path / "hosts"), metrics(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
