"""Errors of collectives on GPUs that XLA has not raised."""

import sys
from collections.abc import Callable

_raised: set[str] = set()  # failures that check() has raised


def check() -> None:
    """Raises if a collective on a GPU of this process has failed.

    On GPUs, XLA reports a failed collective at the next collective of the same communicator. So the failure of the last
    collective of a program is not reported, and its result is undefined. Call this function after
    `jax.block_until_ready`, before results are used outside of JAX. Failures that no call of this function has raised
    are printed to standard error at exit. On CPUs, the collectives themselves raise.

    Raises:
      RuntimeError: at least one collective has failed; the text has one line for each communicator.
    """
    module = sys.modules.get("jaxcomm._cuda")
    failures = module.failures() if module else []
    if failures:
        _raised.update(failures)
        raise RuntimeError("\n".join(f"jaxcomm: {failure}" for failure in failures))


def at_exit(failures: Callable[[], list[str]]) -> None:
    """Prints the failures that check() has not raised."""
    for failure in failures():
        if failure not in _raised:
            print(f"jaxcomm: {failure}; results are undefined (jaxcomm.check)", file=sys.stderr)
