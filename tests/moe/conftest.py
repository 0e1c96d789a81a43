"""Tests of jaxcomm.moe run without implicit promotion, because users may have switched it off."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(request):
    """Compiles quickly: these tests spend most of their time in compilations. `--size full` compiles as users do."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", before or request.config.getoption("--size") == "default")
    yield
    jax.config.update("jax_disable_most_optimizations", before)
