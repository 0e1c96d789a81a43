"""Tests of jaxcomm.moe run without implicit promotion, because users may have switched it off."""

import jax
import pytest

from jaxcomm.moe import choice


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(params=["custom calls", "xla"])
def both_assignments(request, monkeypatch):
    """Rows are assigned by the custom calls of CPUs, and by the functions that other platforms compile."""
    if request.param == "xla":
        monkeypatch.setattr(choice, "assigns_by_custom_calls", lambda platform: False)
