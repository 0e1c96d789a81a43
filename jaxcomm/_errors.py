"""Errors of collectives on GPUs that XLA has not raised."""

import sys
from collections.abc import Callable

_raised: set[str] = set()  # failures that check() has raised
failures: Callable[[], list[str]] = list  # that of the module for GPUs, once its targets are registered


def check() -> None:
    """Raises if a collective on a GPU of this process has failed.

    XLA raises an error of its own, such as CUDA_ERROR_LAUNCH_FAILED, where the program waits for a result. This function
    raises an error that names the operation, the call site, the rank and its peer. Failures that no call of this
    function has raised are printed to standard error. On CPUs, the collectives themselves raise.

    Raises:
      RuntimeError: at least one collective has failed; the text has one line for each communicator.
    """
    found = failures()
    if found:
        _raised.update(found)
        raise RuntimeError("\n".join(f"jaxcomm: {failure}" for failure in found))


def at_exit() -> None:
    """Prints the failures that check() has not raised."""
    for failure in failures():
        if failure not in _raised:
            print(f"jaxcomm: {failure} (jaxcomm.check)", file=sys.stderr)
