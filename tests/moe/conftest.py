"""Tests of jaxcomm.moe run without implicit promotion, because users may have switched it off."""

import jax
import pytest

from jaxcomm import _compat
from jaxcomm.moe import places


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(params=["custom calls", "xla"])
def both_places(request, monkeypatch):
    """The places of choices by the custom calls of CPUs, and by the functions that other platforms compile."""
    if request.param == "xla":
        vary = _compat.equally_varying
        monkeypatch.setattr(places, "count", lambda *xs, **options: places._count(*xs, **options)[0])
        monkeypatch.setattr(places, "place", lambda *xs, **options: places._place(*vary(*xs), **options))
        monkeypatch.setattr(
            places, "slices_and_order", lambda *xs, **options: places._slices_and_order(*vary(*xs), **options)
        )
