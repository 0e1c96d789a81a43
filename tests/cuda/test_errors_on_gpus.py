"""XLA flags and versions of jaxlib that jaxcomm refuses on GPUs."""

import jax
import jaxlib
import pytest

import jaxcomm
from jaxcomm import _native


def test_the_module_has_no_failure_without_a_gpu():
    assert _native.cuda().failures() == []


class Reached(Exception):
    pass


LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit="


@pytest.mark.parametrize(
    "flags", ["", "--xla_gpu_command_buffer_scheduling_mode=LHS", "CONCURRENT", LIMIT + "1", LIMIT + "2"]
)
def test_collectives_that_may_overlap_are_refused(flags, monkeypatch):
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


@pytest.mark.parametrize("driver", [12080, 13010])
def test_a_driver_of_cuda_12_refuses_code_of_cuda_13(driver, monkeypatch):
    class Module:
        driver_version = staticmethod(lambda: driver)
        built = staticmethod(lambda: {"cuda": 13000})

        use_recorder = staticmethod(lambda address: None)

        def configure(*settings):
            raise Reached

    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(_native, "cuda", Module)
    monkeypatch.setattr(jaxlib, "__version__", "0.11.2")
    refusal = r"the driver serves CUDA 12\.8, jaxcomm was built with 13\.0: install a newer driver"
    expected: tuple = (ImportError, refusal) if driver < 13000 else (Reached, None)
    with pytest.raises(expected[0], match=expected[1]):
        _native.register_cuda.__wrapped__()


def test_gpus_need_jaxlib_0_11_2(monkeypatch):
    """An older one provides no communicators. CPU users, and GPUs that use XLA's collectives, are not affected."""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(jaxlib, "__version__", "0.11.1")
    with pytest.raises(ImportError, match=r"0\.11\.2 or later on GPUs, found jaxlib 0\.11\.1: upgrade them"):
        _native.register_cuda.__wrapped__()
    jaxcomm.distributed.register()
