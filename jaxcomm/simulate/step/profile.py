"""Measured times of instructions, from a trace of ``jax.profiler``.

Source of the format: Trace Event Format, Google, 2016. XLA adds the names of module and instruction to the arguments of
an event.
"""

import gzip
import json
import math
import pathlib
import statistics
from typing import Any

from jaxcomm.simulate.step.tasks import StepError

_RARE = 4  # times as few starts as another kernel of the instruction; a guess


def _events(path: str) -> list[Any]:
    data = pathlib.Path(path).read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = content["traceEvents"] if isinstance(content, dict) else content
    except (ValueError, KeyError, EOFError, gzip.BadGzipFile) as error:
        raise StepError(f"{path}: not a trace of jax.profiler: {error!r}") from None
    if not isinstance(events, list):
        raise StepError(f"{path}: not a trace of jax.profiler: traceEvents is no list")
    return events


def times(path: str, module: str) -> dict[str, float]:
    """Seconds of one execution of each instruction of a module, by name.

    An instruction may start several kernels. On each device, their times add up; the median over devices counts.

    Args:
      path: a ``*.trace.json.gz``, or the JSON in it.
      module: name of the HLO module.

    Raises:
      StepError: the file is no trace, has no event of the module, or has several programs of this name; the text
        names the file and the event.
      OSError: the file cannot be read.
    """
    found: dict[str, dict[str, dict[str, list[float]]]] = {}  # by instruction, device and kernel
    others: set[str] = set()
    programs: set[str] = set()
    for number, event in enumerate(_events(path)):
        arguments = event.get("args") if isinstance(event, dict) and event.get("ph") == "X" else None
        if not isinstance(arguments, dict) or "hlo_op" not in arguments:
            continue
        if arguments.get("hlo_module") != module:
            others.add(str(arguments.get("hlo_module")))
            continue
        length = event.get("dur")
        if isinstance(length, bool) or not isinstance(length, int | float) or not math.isfinite(length) or length < 0:
            raise StepError(f"{path}: event {number}: dur: got {length!r}, expected microseconds of at least 0")
        if "program_id" in arguments:
            programs.add(str(arguments["program_id"]))
        device = f"{event.get('pid')} {arguments.get('device_ordinal')}"
        kernels = found.setdefault(str(arguments["hlo_op"]), {}).setdefault(device, {})
        kernels.setdefault(str(event.get("name")), []).append(float(length))
    if not found:
        text = f"it has {', '.join(sorted(others))}" if others else "no event names an instruction"
        raise StepError(f"{path}: no event of the module {module}; {text}")
    if len(programs) > 1:
        names = ", ".join(sorted(programs))
        raise StepError(f"{path}: {len(programs)} programs have the name {module} (program_id {names}); profile one")
    return {
        name: 1e-6 * statistics.median(_once(kernels) for kernels in devices.values())
        for name, devices in found.items()
    }


def _once(kernels: dict[str, list[float]]) -> float:
    """Time of one execution on a device: the median of each kernel, times its starts in an execution.

    The number of executions is the median of the counts of kernels. Of two counts in the middle it is the smaller one,
    unless that kernel is rare, such as one that a first execution starts.
    """
    counts = list(map(len, kernels.values()))
    low, high = statistics.median_low(counts), statistics.median_high(counts)
    executions = high if _RARE * low < high else low
    return sum(statistics.median(own) * len(own) / executions for own in kernels.values())
