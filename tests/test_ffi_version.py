"""The version of XLA's FFI that a native module was built for, against the installed jaxlib's."""

import contextlib
import importlib.metadata
import re

import jax
import pytest

from jaxcomm import _native


@pytest.mark.parametrize(("built", "fits"), [((0, 2), True), ((0, 3), True), ((0, 4), False), ((1, 0), False)])
def test_a_module_for_this_jaxlib_an_older_one_or_a_newer_one(built, fits, monkeypatch, tmp_path):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    _native.check_ffi_version((9, 9))  # a jaxlib without the header
    api = tmp_path / "xla" / "ffi" / "api"
    api.mkdir(parents=True)
    (api / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 0\n\n#define XLA_FFI_API_MINOR 3\n")
    jaxlib = re.escape(importlib.metadata.version("jaxlib"))
    expected = rf"built for XLA FFI {built[0]}\.{built[1]}, but jaxlib {jaxlib} has 0\.3: upgrade jax and jaxlib, or"
    with contextlib.nullcontext() if fits else pytest.raises(ImportError, match=expected):
        _native.check_ffi_version(built)


def test_a_cuda_package_of_another_version(monkeypatch):
    versions = {"jaxcomm": "0.1.0", "jaxcomm-cuda13": "0.2.0"}
    monkeypatch.setattr(_native.importlib.util, "find_spec", lambda name: name == "jaxcomm_cuda13")
    monkeypatch.setattr(_native.importlib.metadata, "version", versions.get)
    with pytest.raises(ImportError, match=r"jaxcomm-cuda13 0\.2\.0 needs jaxcomm 0\.2\.0, found 0\.1\.0"):
        _native.cuda.__wrapped__()
