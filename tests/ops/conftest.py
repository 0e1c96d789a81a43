"""Tests of ops run without implicit promotion, because users may have switched it off.

If an op runs the code of another op, the default size has a sample of its tests.
"""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        sample = getattr(getattr(item, "cls", None), "sample", ())
        if sample and item.originalname.removeprefix("test_") not in sample:
            item.add_marker(pytest.mark.full)
