"""Errors of collectives that nothing else raises."""

import sys
from collections.abc import Callable

_told: set[str] = set()  # failures that check() has raised


def check() -> None:
    """Raises if a collective on a GPU of this process has failed; to be called once results are there.

    On GPUs a collective that gives up can tell XLA only at the next one on the same communicator, which raises. Of the
    last one of a program there is none: its result is undefined, and nobody says so. Call this after
    `jax.block_until_ready`, before results are used outside of JAX. What nobody has asked for is written to standard
    error when the process ends. On CPU the collectives themselves raise.

    Raises:
      RuntimeError: some have failed; the text has one line for each communicator.
    """
    module = sys.modules.get("jaxcomm._cuda")
    failures = module.failures() if module else []
    if failures:
        _told.update(failures)
        raise RuntimeError("\n".join(f"jaxcomm: {failure}" for failure in failures))


def at_exit(failures: Callable[[], list[str]]) -> None:
    """Says what nobody has asked for."""
    for failure in failures():
        if failure not in _told:
            print(f"jaxcomm: {failure}; results are undefined (jaxcomm.check)", file=sys.stderr)
