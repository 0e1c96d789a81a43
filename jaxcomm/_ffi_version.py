"""Versions of XLA's FFI: that of the native modules and that of the installed jaxlib."""

import importlib.metadata
import pathlib
import re

import jax


def jaxlib_version(header: str, major: str, minor: str) -> tuple[int, int] | None:
    """The version that a header of the installed jaxlib defines; None if jaxlib has no such header."""
    path = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", header)
    if not path.exists():
        return None
    text = path.read_text()
    found = [re.search(rf"define {name} +(\d+)", text) for name in (major, minor)]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def api_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib; None if its header does not define one."""
    return jaxlib_version("c_api.h", "XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR")


def check(built: tuple[int, int]) -> None:
    """Compares the version that a native module was built for with the installed jaxlib's.

    XLA accepts handlers of its own version or an older one; it supports each version for at least 12 months
    (xla/ffi/api/c_api.h).

    Raises:
      ImportError: the module was built for a newer version.
    """
    installed = api_version()
    if installed is not None and built > installed:
        jaxlib = importlib.metadata.version("jaxlib")
        raise ImportError(
            f"jaxcomm was built for XLA FFI {built[0]}.{built[1]}, but jaxlib {jaxlib} has {installed[0]}."
            f"{installed[1]}: upgrade jax and jaxlib, or build jaxcomm again with this jaxlib installed"
        )
