"""XLA flags, drivers and versions of jaxlib that jaxcomm refuses on GPUs."""

import jax
import jaxlib
import pytest

import jaxcomm
from jaxcomm import _native


class Reached(Exception):
    pass


MODE = "--xla_gpu_command_buffer_scheduling_mode="
LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit="
OVERLAP = (RuntimeError, "would run at the same time")
OLD_DRIVER = r"the driver serves CUDA 12\.8, jaxcomm was built with 13\.0: install a newer driver"


@pytest.mark.parametrize(
    ("flags", "driver", "version", "expected"),
    [
        ("", 13010, "0.11.2", (Reached, None)),
        (f"{MODE}LHS", 13010, "0.11.2", (Reached, None)),
        (f"--xla_foo=1 {MODE}CONCURRENT --xla_bar=2", 13010, "0.11.2", OVERLAP),
        (f"{LIMIT}1", 13010, "0.11.2", (Reached, None)),
        (f"{LIMIT}2", 13010, "0.11.2", OVERLAP),
        ("", 12080, "0.11.2", (ImportError, OLD_DRIVER)),
        # An older one provides no communicators.
        ("", 13010, "0.11.1", (ImportError, r"0\.11\.2 or later on GPUs, found jaxlib 0\.11\.1: upgrade them")),
    ],
)
def test_what_is_refused(flags, driver, version, expected, monkeypatch):
    class Module:
        driver_version = staticmethod(lambda: driver)
        built = staticmethod(lambda: {"cuda": 13000})
        use_recorder = staticmethod(lambda address: None)

        def configure(*settings):
            raise Reached

    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(_native, "cuda", Module)
    monkeypatch.setattr(jaxlib, "__version__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(expected[0], match=expected[1]):
        _native.register_cuda.__wrapped__()
    if version == "0.11.1":  # CPU users, and GPUs that use XLA's collectives, are not affected
        jaxcomm.distributed.register()
