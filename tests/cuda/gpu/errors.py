"""Errors where collectives cannot run: pytest errors.py -k <test>, in an environment without a requirement."""

import jax
import numpy as np
import pytest
from group import on_ranks, put
from report import note

import jaxcomm


def refusal():
    f = on_ranks(lambda x: jaxcomm.psum(x, "i", algorithm="direct"))
    with pytest.raises((RuntimeError, ValueError)) as raised:
        jax.block_until_ready(f(put(np.ones((jax.device_count(), 8), np.float32))))
    note("error", str(raised.value))
    assert "jaxcomm: psum at " in str(raised.value)
    assert "errors.py:" in str(raised.value)
    return str(raised.value)


def test_no_windows():
    """NCCL_WIN_ENABLE=0."""
    text = refusal()
    assert "NCCL makes no windows" in text
    assert "NCCL_WIN_ENABLE" in text


def test_old_nccl():
    """JAX loads an NCCL that is older than 2.29.7."""
    text = refusal()
    assert "but jaxcomm's kernels need " in text
    assert "Install version" in text


def test_no_module():
    """jaxcomm was built without its module for GPUs."""
    f = on_ranks(lambda x: jaxcomm.psum(x, "i", algorithm="direct"))
    with pytest.raises(RuntimeError, match=r"jaxcomm: psum at .*errors\.py:\d+.*: while compiling, .*JAXCOMM_CUDA=1"):
        f(put(np.ones((1, 8), np.float32)))
