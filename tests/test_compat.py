"""Decisions by versions of jaxlib, and settings of JAX that jaxcomm changes."""

import jax
import jaxlib
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxcomm import _compat


@pytest.mark.parametrize(
    ("version", "provides", "windows"),
    [
        ("0.10.2", False, False),
        ("0.11.2", True, False),
        ("0.12.0", True, True),
        ("0.12.0.dev20260101", True, True),
        ("1.0.0", True, True),
    ],
)
def test_features_of_versions_of_jaxlib(monkeypatch, version, provides, windows):
    monkeypatch.setattr(jaxlib, "__version__", version)
    assert (_compat.provides_communicators(), _compat.has_windows()) == (provides, windows)


@pytest.mark.parametrize(("enabled", "folder"), [(True, True), (True, False), (False, True)])
def test_the_compilation_cache_is_left_only_where_it_is_used(monkeypatch, tmp_path, enabled, folder):
    resets = []
    monkeypatch.setattr(compilation_cache, "reset_cache", lambda: resets.append(1))
    wanted = {
        "jax_enable_compilation_cache": enabled, "jax_compilation_cache_dir": str(tmp_path) if folder else None,
    }  # fmt: skip
    before = {name: jax.config.values[name] for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        used = enabled and folder
        assert _compat.leave_compilation_cache() == used
        assert jax.config.values["jax_enable_compilation_cache"] == (enabled and not used)
        assert len(resets) == used
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
