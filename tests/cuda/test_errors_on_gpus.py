"""jaxcomm.check() on a fake of the module; XLA flags and versions of jaxlib that jaxcomm refuses on GPUs."""

import sys
import types

import jax
import jaxlib
import pytest

import jaxcomm
from jaxcomm import _errors, _native

FAILURES = ["psum at a.py:1: rank 0 aborted in the exit barrier", "pmax at b.py:2: rank 3 aborted in step 1"]


@pytest.fixture
def failures(monkeypatch):
    found: list[str] = []
    monkeypatch.setitem(sys.modules, "jaxcomm._cuda", types.SimpleNamespace(failures=lambda: found))
    monkeypatch.setattr(_errors, "_raised", set())
    return found


def test_no_failure_no_module(failures, monkeypatch):
    jaxcomm.check()
    monkeypatch.delitem(sys.modules, "jaxcomm._cuda")
    jaxcomm.check()


def test_failures_are_raised_every_time(failures):
    failures += FAILURES
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            jaxcomm.check()
        assert str(error.value) == f"jaxcomm: {FAILURES[0]}\njaxcomm: {FAILURES[1]}"


def test_unreported_failures_are_printed_at_exit(failures, capsys):
    failures.append(FAILURES[0])
    with pytest.raises(RuntimeError):
        jaxcomm.check()
    failures.append(FAILURES[1])
    _errors.at_exit(lambda: failures)
    assert capsys.readouterr().err == f"jaxcomm: {FAILURES[1]}; results are undefined (jaxcomm.check)\n"


def test_the_module_has_no_failure_without_a_gpu():
    assert _native.cuda().failures() == []


LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit="


@pytest.mark.parametrize(
    "flags", ["", "--xla_gpu_command_buffer_scheduling_mode=LHS", "CONCURRENT", LIMIT + "1", LIMIT + "2"]
)
def test_collectives_that_may_overlap_are_refused(flags, monkeypatch):
    class Reached(Exception):
        pass

    def cuda():
        raise Reached

    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(_native, "cuda", cuda)
    monkeypatch.setattr(jaxlib, "__version__", "0.11.2")
    expected: tuple = (Reached, None)
    if flags == "CONCURRENT":
        flags = "--xla_foo=1 --xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_bar=2"
        expected = (RuntimeError, "would run at the same time")
    if flags == LIMIT + "2":
        expected = (RuntimeError, "would run at the same time")
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(expected[0], match=expected[1]):
        _native.register_cuda.__wrapped__()


def test_gpus_need_jaxlib_0_11_2(monkeypatch):
    """An older one provides no communicators. CPU users, and GPUs that use XLA's collectives, are not affected."""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(jaxlib, "__version__", "0.11.1")
    with pytest.raises(ImportError, match=r"0\.11\.2 or later on GPUs, found jaxlib 0\.11\.1: upgrade them"):
        _native.register_cuda.__wrapped__()
    jaxcomm.distributed.register()
