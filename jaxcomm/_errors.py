"""Errors of collectives that nothing else raises."""

import sys
from collections.abc import Callable

_told: set[str] = set()  # failures that check() has raised


def check() -> None:
    """Raises if a collective on a GPU of this process has failed.

    On GPUs, the next collective raises the error of a failed one. After the last collective of a program no call can
    raise, and its result is undefined if it has failed. Call check() after `jax.block_until_ready`, before you use
    results outside of JAX. Errors that no call has raised are written to standard error when the process ends. On CPUs,
    the failed collective itself raises.

    Raises:
      RuntimeError: a collective has failed; the message has one line for each communicator.
    """
    module = sys.modules.get("jaxcomm._cuda")
    failures = module.failures() if module else []
    if failures:
        _told.update(failures)
        raise RuntimeError("\n".join(f"jaxcomm: {failure}" for failure in failures))


def at_exit(failures: Callable[[], list[str]]) -> None:
    """Prints failures that check() has not raised."""
    for failure in failures():
        if failure not in _told:
            print(f"jaxcomm: {failure}; results are undefined (jaxcomm.check)", file=sys.stderr)
