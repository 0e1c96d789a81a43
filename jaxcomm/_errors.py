"""Errors of collectives on GPUs that XLA has not raised."""

from collections.abc import Callable

failures: Callable[[], list[str]] = list  # that of the module for GPUs, once its targets are registered


def check() -> None:
    """Raises if a collective on a GPU of this process has failed.

    XLA raises an error of its own, such as CUDA_ERROR_LAUNCH_FAILED, where the program waits for a result. This
    function raises an error that names the operation, the call site, the rank and its peer. On CPUs, the collectives
    themselves raise.

    Raises:
      RuntimeError: at least one collective has failed; the text has one line for each communicator.
    """
    if found := failures():
        raise RuntimeError("\n".join(f"jaxcomm: {failure}" for failure in found))
