"""What is decided by versions of jaxlib."""

import jaxlib
import pytest

from jaxcomm import _compat


@pytest.mark.parametrize(
    ("version", "lends", "windows"),
    [
        ("0.10.2", False, False),
        ("0.11.1", False, False),
        ("0.11.2", True, False),
        ("0.11.10", True, False),
        ("0.12.0", True, True),
        ("0.12.0.dev20260101", True, True),
        ("0.100", True, True),
        ("1.0.0", True, True),
    ],
)
def test_what_a_version_of_jaxlib_has(monkeypatch, version, lends, windows):
    monkeypatch.setattr(jaxlib, "__version__", version)
    assert (_compat.lends_communicators(), _compat.has_windows()) == (lends, windows)
