"""Tests of jaxcomm.moe run without implicit promotion, because users may have switched it off."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
