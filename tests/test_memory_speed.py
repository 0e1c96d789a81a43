"""The speed of memory: figures from times of a known machine, and a short measurement."""

import os

import pytest

from jaxcomm import _memory_speed as speed
from jaxcomm.simulate import cpus


def test_figures_of_a_known_machine(monkeypatch):
    """Copies at 64, 32 and 8 GB/s; a write to memory takes as long as one to the shared cache."""
    seconds = {
        speed._PRIVATE_BYTES: speed._PRIVATE_BYTES / 64e9,
        speed._SHARED_BYTES: speed._SHARED_BYTES / 32e9,
        speed._MEMORY_BYTES: speed._MEMORY_BYTES / 2 / 8e9 + speed._MEMORY_BYTES / 2 / 32e9,
    }
    monkeypatch.setattr(speed, "_copy", lambda total: total)
    monkeypatch.setattr(speed, "_fastest_s", lambda run, calls: seconds.get(run, 0.01))  # 10 ms: all threads
    monkeypatch.setattr(speed, "_remote_s", lambda size: 2e-6 + size / 4e9)
    found = speed.measure()
    all_of_them = len(os.sched_getaffinity(0)) * speed._MEMORY_BYTES / 0.01
    wanted = {
        "private": 64e9,
        "shared": 32e9,
        "memory": 8e9,
        "memory_of_all": all_of_them,
        "remote": 4e9,
        "call_s": 2e-6,
    }
    assert found == pytest.approx(wanted)
    cpus.Cpus(8, 2, 1e-7, **found)
    monkeypatch.setattr(speed, "_remote_s", lambda size: None)
    assert set(speed.measure()) == set(wanted) - {"remote", "call_s"}


def test_measures(monkeypatch):
    """Only that it runs: times depend on the machine."""
    monkeypatch.setattr(speed, "_MEMORY_BYTES", 1 << 20)
    found = speed.measure()
    assert all(found[name] > 0 for name in ("private", "shared", "memory", "memory_of_all"))
    short_s = speed._remote_s(4096)
    assert short_s is None or short_s > 0
