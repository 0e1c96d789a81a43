"""What runs each collective by default over the devices of this process: what lowering resolves."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxcomm import _request
from jaxcomm._measure import collectives

_SIZES = (1 << 10, 1 << 20)  # bytes of the larger of operand and result


def defaults(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Op and bytes of the operand -> algorithm and reason. Compiles and runs nothing."""
    n = len(devices)
    # The processes of a program agree on the record of its GPUs, so one process alone cannot ask for it.
    if n < 2 or (devices[0].platform == "gpu" and jax.process_count() > 1):
        return {}
    group = collectives.Group(Mesh(np.array(devices), ("i",), axis_types=(AxisType.Auto,)), "i")
    found = {}
    for collective in collectives.COLLECTIVES.values():
        module = importlib.import_module(f"jaxcomm.ops.{_request.ROWS[collective.native].functions[0]}")
        for size_bytes in _SIZES if collective.sized else _SIZES[:1]:
            count = collectives.make_size(collective, size_bytes, 4, n).operand
            program: Any = collectives.program(collective, module, group, 1, {})
            call = f"{collective.name} of {4 * count} bytes" if collective.sized else collective.name
            try:
                with _request.resolutions() as calls:
                    program.lower(jax.ShapeDtypeStruct((n * count,), jnp.float32))
            except RuntimeError as error:  # the CUDA module cannot be used
                found[call] = f"none: {str(error).partition(chr(10))[0]}"
            for _, resolution in calls:
                found[call] = f"{resolution.algorithm}: {resolution.reason}"
    return found
