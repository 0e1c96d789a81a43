"""Tests of ops may not lean on implicit promotion: what works here works for users who have switched it off."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
